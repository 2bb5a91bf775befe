"""What `convert` has to say."""

import sys

from convert import fahrenheit

for celsius, wanted in ((100, 212), (0, 32), (-40, -40)):
    if fahrenheit(celsius) != wanted:
        sys.exit(f"{celsius} C are {wanted} F, not {fahrenheit(celsius):g}")
print("all well")
