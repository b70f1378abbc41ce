// Dropout: one 32-bit random number for each (batch, head, query, key), whatever kernel, tile or split asks for it.
//
// The generator is Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
// One call yields four words. They serve the queries i, i + 8 and the keys j, j + 8 of a 16 x 16 tile, which is how
// mma.sync spreads a tile of scores over its lanes: no thread draws a number that it does not use.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "params.h"

namespace mha_ext {

struct RandomWords {
  uint32_t word[4];
};

MHA_HOST_DEVICE RandomWords philox4x32_7(uint32_t key0, uint32_t key1, uint32_t counter0, uint32_t counter1,
                                         uint32_t counter2, uint32_t counter3) {
  constexpr int kRounds = 7;
  constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier2 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = uint64_t{kMultiplier0} * counter0;
    const uint64_t product2 = uint64_t{kMultiplier2} * counter2;
    counter0 = static_cast<uint32_t>(product2 >> 32) ^ counter1 ^ key0;
    counter1 = static_cast<uint32_t>(product2);
    counter2 = static_cast<uint32_t>(product0 >> 32) ^ counter3 ^ key1;
    counter3 = static_cast<uint32_t>(product0);
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return {{counter0, counter1, counter2, counter3}};
}

// The state of torch's generator, as rng_state holds it.
struct DropoutSeed {
  uint32_t key0, key1, offset;
};

MHA_HOST_DEVICE DropoutSeed dropout_seed(const int64_t* rng_state) {
  const uint64_t seed = static_cast<uint64_t>(rng_state[0]);
  return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), static_cast<uint32_t>(rng_state[1])};
}

// The words of queries {i, i ^ 8} and keys {j, j ^ 8}; random_word says which is whose. batch_head = b * num_heads_q +
// h, modulo 2^32.
MHA_HOST_DEVICE RandomWords random_words(const DropoutSeed& seed, uint32_t batch_head, int i, int j) {
  const uint32_t tile_key = static_cast<uint32_t>((j >> 4) * 8 + (j & 7));
  const uint32_t tile_query = static_cast<uint32_t>((i >> 4) * 8 + (i & 7));
  return philox4x32_7(seed.key0, seed.key1, tile_key, tile_query, batch_head, seed.offset);
}

MHA_HOST_DEVICE int random_word(int i, int j) { return 2 * ((i >> 3) & 1) + ((j >> 3) & 1); }

MHA_HOST_DEVICE bool keeps(const DropoutParams& params, uint32_t word) {
  return word >= params.threshold && !params.drop_all;
}

}  // namespace mha_ext
