"""Shipping: bundles of registries and cubins, written and read; registries compared and merged; a store swept."""
