// What a launch leaves to the next one, without the host between them. Source: decode/queued.py.
#pragma once

// Makes the tokens that were chosen those that the next launch decodes, and tells them to the host, whose memory `told` is.
// Where no token was chosen (FW_NO_TOKEN), the next launch decodes token 0: the host ends the sequence when it is told.
// A sequence in `live` moves on by one position, the others lie at 0: in `place`, and in `places` unless it is null. One block.
extern "C" __global__ void advance_rows(const int* chosen, int* tokens, int* told, int* place, int* places,
                                        unsigned live, int batch) {
    const int row = threadIdx.x;
    if (row >= batch) return;
    const int token = chosen[row];
    tokens[row] = max(token, 0);
    told[row] = token;
    const int next = live >> row & 1 ? place[row] + 1 : 0;
    place[row] = next;
    if (places) places[row] = next;
}
