"""Counts the skipped tests of junit files; fails if a test was skipped for want of ../shared although it is there."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

reasons: Counter[str] = Counter()
for file in sys.argv[1:]:
    for skipped in ET.parse(file).iter("skipped"):
        reasons[skipped.get("message", "")] += 1
for reason, count in reasons.most_common():
    print(f"{count:>4} skipped: {reason}")
print(f"{sum(reasons.values())} skipped in all")

shared = Path(__file__).resolve().parents[2] / "shared"
if shared.is_dir() and any("../shared" in reason for reason in reasons):
    sys.exit(f"tests were skipped for want of ../shared, although {shared} is there")
