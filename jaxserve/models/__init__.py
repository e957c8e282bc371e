"""Model functions: parameters as plain pytrees with stacked layers, one file an architecture."""
