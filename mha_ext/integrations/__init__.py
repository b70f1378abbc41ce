"""How other libraries come to call `mha_ext.attention`."""
