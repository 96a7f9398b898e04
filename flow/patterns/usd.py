"""An amount of US dollars in a flow's input."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, Field

# With its cents ("2E+3" is 2000.00), so that it can be shown to a person.
Dollars = Annotated[
    Decimal,
    Field(gt=0, max_digits=15, decimal_places=2),
    AfterValidator(lambda amount: amount.quantize(Decimal("0.01"))),
]
