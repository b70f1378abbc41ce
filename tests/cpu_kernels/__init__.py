"""The kernels of csrc/cpu without torch, built for processors that this machine is not, and with sanitizers."""
