"""How experiments are planned, run and measured."""
