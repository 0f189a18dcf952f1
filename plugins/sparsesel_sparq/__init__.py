"""SparQ: approximate scores from the largest query components choose the keys; a mean value stands for the rest."""
