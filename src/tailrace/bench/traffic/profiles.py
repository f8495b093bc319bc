"""Figures of the other traces in ../shared/traces; the traces themselves are not here.

Each was computed by `profile.measure` from all rows of a compact sample; a test repeats that
where the file is present. `source` names publisher, licence and paper. Beware of

    mooncake-synthetic     made by its authors from public data sets; no production traffic
    servegen-*             synthesised from ServeGen's per-client rates, gaps and length histograms,
                           input and output drawn independently
    servegen-m-large       runs at its true 342 requests/s: give a rate
    burstgpt               ten sparse hours in whole seconds: for lengths, not for its arrivals

Of the mooncake profiles, `prefixes` says how prompts share blocks of 512 tokens; the ideal hit
rate of whole blocks is 0.35 of all prompt tokens (conversation) and 0.65 (synthetic).
"""

from __future__ import annotations

from tailrace.bench.traffic.prefixes import PrefixFigures
from tailrace.bench.traffic.profile import Profile

AZURE_CODE = Profile(
    name="azure-code",
    source=(
        "figures of Azure/AzurePublicDataset, LLM inference trace 2023 (code), CC-BY-4.0; "
        "Patel et al., Splitwise, ISCA 2024"
    ),
    rate_rps=2.566,
    arrival_cv=13.15,
    input_tokens=(
        *(3, 7, 12, 17, 35, 75, 147, 232, 385, 578),
        *(770, 938, 1075, 1261, 1469, 1690, 1909, 2164, 2433, 2745),
        *(3193, 3923, 5194, 6097, 7315, 7435, 7436, 7436, 7437, 7437),
    ),
    output_tokens=(
        *(6, 6, 6, 6, 6, 6, 7, 7, 8, 9),
        *(9, 10, 11, 12, 13, 14, 16, 18, 20, 24),
        *(29, 39, 55, 69, 90, 145, 252, 361, 831, 1899),
    ),
    rank_correlation=-0.021,
    gaps=(
        *(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.002566, 0.002566, 0.005133),
        *(0.007699, 0.01283, 0.0385, 0.09752, 0.1642, 0.231, 0.2438, 0.2515, 0.2566, 0.2669),
        *(0.4106, 0.5107, 0.7006, 0.7751, 1.029, 1.732, 5.659, 25.98, 212.4, 557.3),
    ),
)
MOONCAKE_CONVERSATION = Profile(
    name="mooncake-conversation",
    source=(
        "figures of kvcache-ai/Mooncake, FAST'25 conversation trace, its first 6,635 of "
        "12,031 requests; repository Apache-2.0; Qin et al., Mooncake, FAST 2025"
    ),
    rate_rps=3.209,
    arrival_cv=2.937,
    input_tokens=(
        *(891, 892, 893, 894, 895, 901, 968, 1276, 1687, 2387),
        *(3460, 4468, 5310, 6293, 7436, 8735, 10027, 11655, 13575, 15854),
        *(18562, 22895, 28274, 32655, 41103, 66289, 90760, 109074, 121471, 124847),
    ),
    output_tokens=(
        *(1, 1, 1, 3, 3, 9, 24, 44, 98, 155),
        *(216, 263, 299, 329, 356, 380, 402, 426, 451, 476),
        *(510, 550, 606, 647, 711, 849, 1137, 1644, 2000, 2000),
    ),
    rank_correlation=0.072,
    gaps=(
        *(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        *(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        *(0.0, 0.0, 9.625, 9.628, 9.628, 9.628, 9.632, 9.632, 9.632, 9.632),
    ),
    prefixes=PrefixFigures(
        block_tokens=512,
        common_blocks=1,
        follow_shares=(0.000, 0.182, 0.541, 0.320, 0.405, 0.476, 0.524, 0.491, 0.532, 0.481),
        taken_shares=(0.000, 0.863, 0.788, 0.814, 0.828, 0.784, 0.646, 0.708, 0.770, 0.833),
        taken_evenness=1.317,
        distances=(5, 135, 214, 393, 830, 1439, 3027, 5738),
        hit_share=0.3515,
    ),
)
MOONCAKE_SYNTHETIC = Profile(
    name="mooncake-synthetic",
    source=(
        "figures of kvcache-ai/Mooncake, FAST'25 synthetic trace (public data sets, Poisson "
        "arrivals: no production traffic); repository Apache-2.0; Qin et al., Mooncake, FAST "
        "2025"
    ),
    rate_rps=3.906,
    arrival_cv=1.011,
    input_tokens=(
        *(13, 13, 13, 16, 18, 22, 30, 45, 88, 277),
        *(912, 2777, 4365, 6657, 11587, 14730, 16289, 17642, 19411, 23175),
        *(28430, 34376, 38615, 41329, 49009, 55782, 66458, 76328, 191374, 191378),
    ),
    output_tokens=(
        *(1, 1, 2, 2, 2, 2, 4, 6, 8, 11),
        *(16, 22, 32, 49, 69, 92, 126, 169, 211, 250),
        *(289, 333, 389, 444, 519, 658, 769, 782, 825, 893),
    ),
    rank_correlation=-0.517,
    gaps=(
        *(0.0, 0.0, 0.003906, 0.01172, 0.02344, 0.05078, 0.1016, 0.1601, 0.2148, 0.2812),
        *(0.3515, 0.4258, 0.5039, 0.5937, 0.6835, 0.789, 0.8945, 1.043, 1.215, 1.383),
        *(1.629, 1.91, 2.281, 2.597, 3.066, 3.676, 4.746, 5.308, 7.371, 8.277),
    ),
    prefixes=PrefixFigures(
        block_tokens=512,
        common_blocks=0,
        follow_shares=(0.000, 0.000, 0.003, 0.685, 0.872, 0.504, 0.612, 0.594, 0.787, 0.872),
        taken_shares=(0.000, 0.000, 1.000, 0.986, 0.991, 0.993, 0.993, 0.991, 0.989, 0.991),
        taken_evenness=3.487,
        distances=(1, 18, 67, 226, 583, 1086, 2202, 3044),
        hit_share=0.6504,
    ),
)
SERVEGEN_DEEPSEEK_R1 = Profile(
    name="servegen-deepseek-r1",
    source=(
        "figures of 6,000 requests synthesised from alibaba/ServeGen, deepseek-r1 (600 s "
        "window at 72,000 s, 26 clients), Apache-2.0; Xiang et al., arXiv 2505.09999"
    ),
    rate_rps=17.29,
    arrival_cv=1.523,
    input_tokens=(
        *(4, 4, 6, 7, 9, 14, 44, 59, 82, 155),
        *(164, 180, 220, 262, 286, 354, 361, 371, 433, 482),
        *(680, 871, 2039, 2721, 4940, 12205, 22510, 27813, 31016, 38898),
    ),
    output_tokens=(
        *(53, 72, 99, 111, 132, 178, 242, 287, 322, 349),
        *(375, 400, 425, 449, 476, 505, 538, 585, 641, 732),
        *(844, 1018, 1253, 1442, 1735, 3473, 7730, 11118, 18776, 24882),
    ),
    rank_correlation=-0.073,
    gaps=(
        *(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        *(0.01729, 0.06917, 0.1556, 0.2594, 0.3631, 0.5188, 0.6917, 0.8646, 1.107, 1.383),
        *(1.729, 2.162, 2.819, 3.337, 4.064, 5.395, 7.021, 7.92, 12.21, 18.9),
    ),
)
SERVEGEN_M_LARGE = Profile(
    name="servegen-m-large",
    source=(
        "figures of 6,000 requests synthesised from alibaba/ServeGen, m-large (600 s window "
        "at 72,000 s, 41 clients of 72 % of the rate), Apache-2.0; Xiang et al., arXiv "
        "2505.09999"
    ),
    rate_rps=342.2,
    arrival_cv=2.653,
    input_tokens=(
        *(35, 60, 61, 61, 64, 269, 561, 575, 578, 581),
        *(584, 587, 591, 596, 645, 827, 831, 833, 836, 838),
        *(841, 845, 851, 856, 887, 1433, 2482, 3402, 5854, 14444),
    ),
    output_tokens=(
        *(1, 1, 1, 1, 1, 3, 7, 15, 15, 15),
        *(15, 15, 15, 16, 33, 37, 41, 43, 46, 51),
        *(58, 66, 81, 89, 105, 168, 329, 541, 700, 2000),
    ),
    rank_correlation=0.184,
    gaps=(
        *(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        *(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.3422, 0.3422, 0.6843),
        *(1.026, 1.711, 3.079, 4.106, 5.817, 8.896, 13.34, 16.77, 26.35, 32.85),
    ),
)
BURSTGPT = Profile(
    name="burstgpt",
    source=(
        "figures of the first 383 requests of HPMLL/BurstGPT, CC-BY-4.0; Wang et al., "
        "BurstGPT, KDD 2025"
    ),
    rate_rps=0.01025,
    arrival_cv=4.464,
    input_tokens=(
        *(9, 9, 10, 10, 14, 18, 23, 33, 42, 68),
        *(99, 145, 203, 264, 353, 434, 510, 601, 757, 929),
        *(1036, 1276, 1437, 1540, 1639, 1844, 1960, 1995, 2126, 2126),
    ),
    output_tokens=(
        *(2, 2, 3, 4, 9, 14, 19, 30, 45, 67),
        *(83, 119, 180, 210, 238, 266, 297, 326, 353, 385),
        *(427, 495, 586, 663, 845, 1158, 1442, 1903, 2019, 2019),
    ),
    rank_correlation=0.276,
    gaps=(
        *(0.0, 0.0, 0.0, 0.0, 0.01025, 0.0205, 0.03075, 0.05125, 0.07175, 0.09225),
        *(0.1127, 0.1435, 0.1742, 0.205, 0.2357, 0.2767, 0.3177, 0.3792, 0.5022, 0.6355),
        *(0.779, 1.035, 1.486, 2.122, 2.962, 6.017, 13.76, 45.12, 68.17, 68.17),
    ),
)
ALL = (
    AZURE_CODE,
    MOONCAKE_CONVERSATION,
    MOONCAKE_SYNTHETIC,
    SERVEGEN_DEEPSEEK_R1,
    SERVEGEN_M_LARGE,
    BURSTGPT,
)
