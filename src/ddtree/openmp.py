"""Imported before torch: threads that wait for each other sleep instead of spinning.

GNU OpenMP, which torch's Linux builds use, lets a thread spin at the end of every parallel region. With one other busy
process on a two-core machine that made a step of plain decoding take 1.8 s; sleeping, it takes 0.05 s. On an idle
machine sleeping costs a few percent. A setting of the user's own is left alone.
"""

import os

if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
    os.environ["GOMP_SPINCOUNT"] = "0"
