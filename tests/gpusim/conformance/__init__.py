"""Instructions, form by form, against a NumPy description of what they do. See README.md in this folder."""
