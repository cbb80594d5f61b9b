"""How the data and the models that ship with the embedded tasks were made; nothing of it is in the package."""
