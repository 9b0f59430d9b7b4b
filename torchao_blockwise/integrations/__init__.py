"""Integrations: one package a framework, each imported only by who uses that framework."""
