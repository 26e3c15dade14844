"""Maps and solvers: pure mathematics with the paper's symbols."""
