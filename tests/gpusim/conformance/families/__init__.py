"""One module a family of instructions; importing them fills the list of forms."""
