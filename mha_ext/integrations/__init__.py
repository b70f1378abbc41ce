"""`mha_ext` inside other libraries; each module is imported by itself and says which library it needs."""
