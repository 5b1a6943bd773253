"""The network: layers, architectures, weights. It knows no scheduler."""
