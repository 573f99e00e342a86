"""TensorFlow's graphs (GraphDef) as files: read, never executed."""
