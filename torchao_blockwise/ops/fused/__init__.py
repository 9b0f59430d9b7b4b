"""What is computed and quantized in one pass: a norm's rows, SwiGLU and its gradients."""
