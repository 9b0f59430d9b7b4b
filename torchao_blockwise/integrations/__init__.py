"""Integrations with training frameworks and inference engines. Import the module of the framework that you use."""
