"""
The Triton twins of the functions in kernels/, file by file.

Imported only where the tensors are on a GPU, or under Triton's interpreter.
"""
