"""``multigemm demo``: two layers that live on grouped products, on real data, beside what they replace."""
