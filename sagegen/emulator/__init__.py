"""The emulator: runs the very text that nvcc compiles on the CPU, and says what is wrong with it."""
