"""The papers' numerics, each part of them switched alone: what `sagegen ablate` compares. Nothing of a call's path imports it."""
