"""The papers' numerics, each part of them switched alone: what `sagegen ablate` compares."""
