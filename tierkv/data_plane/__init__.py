"""Moves pages between tiers and into sequences; decides nothing."""
