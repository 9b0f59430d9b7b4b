"""The parts of `train_llm.py`: a byte-level Llama-style decoder trained in bf16, blockwise FP8 and NVFP4."""
