// SPDX-License-Identifier: Apache-2.0
// The tuning constants of the policy `learned`. docs/eviction.md shows what each one is worth;
// `python -m benchmarks.learned_constants` replays traces with other values.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvcache::learned {

// Classes. The thresholds of a feature are a geometric sequence.
inline constexpr double kGap = 12'000;  // ms since the previous turn
inline constexpr double kGapRatio = 3.4;
inline constexpr double kAdded = 2'560;  // tokens that a turn adds
inline constexpr double kAddedRatio = 8;
inline constexpr double kAnswer = 100;  // tokens of an answer
inline constexpr double kAnswerRatio = 3;
// Ages. Bucket b starts at kAge * (kAgeRatio^b - 1).
inline constexpr double kAge = 600;  // ms
inline constexpr double kAgeRatio = 1.5;
// Samples of released blocks.
inline constexpr int kRecords = 16'384;  // at most 65,535
inline constexpr int kSamples = 2;       // per segment; half as many per shared segment
inline constexpr int kRecount = 32;      // recounts per kRecords samples
// Probability of use per bucket before anything is known. Per millisecond, it decreases with age.
inline constexpr double kPrior = .02;
// Weights of priors, in segments of 16 blocks.
inline constexpr double kClassWeight = 60;  // of a class
inline constexpr double kGroupWeight = 60;  // of a level of a feature
inline constexpr double kAllWeight = 30;    // of all classes together
// Simulated pools have at most this many blocks.
inline constexpr int64_t kSimulated = 2'500;
// The duel. C is the number of blocks of a simulated pool.
inline constexpr double kStake = 1. / 8;  // of C: hits that may be lost to LRU
inline constexpr double kShare = .004;    // of the hits of LRU: the same
// Hits gained in simulation that start a trial: a part of C, and a share of the hits of LRU, up to
// four times the stake.
inline constexpr double kEvidence = .01;
inline constexpr double kGain = .035;

}  // namespace kvcache::learned
