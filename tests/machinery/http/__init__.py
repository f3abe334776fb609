"""A real `kvcache serve` process and clients of it over sockets: a fuzzer, and a storm."""
