"""Figures of Azure's 2023 conversation trace; the trace itself is not here.

Source: Azure/AzurePublicDataset, AzureLLMInferenceTrace_conv.csv, CC-BY-4.0, published with
Patel et al., "Splitwise: Efficient Generative LLM Inference Using Phase Splitting", ISCA 2024.
19,366 requests of one hour of 2023-11-16. Computed by `profile.measure` from all rows; a test
repeats that where the file is present.
"""

from __future__ import annotations

from tailrace.bench.traffic.profile import Profile

AZURE_CONV = Profile(
    name="azure-conv",
    source=(
        "figures of Azure/AzurePublicDataset, LLM inference trace 2023 (conversation), CC-BY-4.0; "
        "Patel et al., Splitwise, ISCA 2024"
    ),
    rate_rps=5.530,
    arrival_cv=1.094,
    input_tokens=(
        *(2, 8, 16, 29, 91, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020),
        *(1045, 1071, 1097, 1130, 1189, 1315, 1877, 2735, 4075, 4083, 4092, 4142, 4831, 6212),
        14050,
    ),
    output_tokens=(
        *(7, 12, 14, 16, 24, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129),
        *(151, 177, 217, 384, 395, 400, 411, 424, 430, 451, 522, 601, 644, 954, 1000),
    ),
    rank_correlation=0.073,
)
