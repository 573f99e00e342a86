"""ONNX models to graphs: `read` a file, `lower` it."""
