"""Experiments: variants, workload, comparisons with published figures, tables and figures; one module each."""
