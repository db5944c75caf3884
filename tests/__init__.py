"""The tests. Two processes of them share two cores: threads that wait must not spin. torch reads this as it loads."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
