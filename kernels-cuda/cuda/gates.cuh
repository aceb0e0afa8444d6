// Gated activations: the functions that combine the results of gate and up.
//
// They have the same operations as the definitions of the CPU kernels, so results are bit-identical.
#pragma once

// Functions of a gate, as values of the macro GATE.
enum { UNGATED = 0, SILU = 1, GELU_TANH = 2, CLAMPED = 3 };

// 1 / (1 + e^−g); not for NaN.
INLINE float sigmoid(float g) {
    // Adding this to a number within ±2²² rounds it half to even; the low bits of the sum are then the integer.
    constexpr float ROUND = 12582912.0f;
    float z = fminf(fmaxf(-g, -87.0f), 87.0f);
    float shifted = z * 1.44269504088896341f + ROUND;
    float n = shifted - ROUND;
    float r = fmaf(n, -0.693147182464599609f, z);
    r = fmaf(n, 1.9046543e-9f, r);
    float sum = fmaf(1.0f / 5040.0f, r, 1.0f / 720.0f);
    sum = fmaf(sum, r, 1.0f / 120.0f);
    sum = fmaf(sum, r, 1.0f / 24.0f);
    sum = fmaf(sum, r, 1.0f / 6.0f);
    sum = fmaf(sum, r, 0.5f);
    sum = fmaf(sum, r, 1.0f);
    sum = fmaf(sum, r, 1.0f);
    // n is from −126 to 126, in the low bits of `shifted`.
    float power = __uint_as_float((__float_as_uint(shifted) << 23) + (127u << 23));
    float value = __frcp_rn(1.0f + sum * power);
    return g < -87.0f ? 0.0f : value;
}

INLINE float silu(float g) { return g * sigmoid(g); }

INLINE float gelu_tanh(float g) { return g * sigmoid(g * fmaf(g * g, 0.071354814f, 1.595769f)); }

// The comparisons keep NaN. The product of alpha and the gate can be NaN although neither is.
INLINE float clamped_gate(float gate, float up, float alpha, float limit) {
    float g = limit < gate ? limit : gate;
    float u = limit < up ? limit : up;
    u = -limit > u ? -limit : u;
    float z = alpha * g;
    return g * (z == z ? sigmoid(z) : z) * (u + 1.0f);
}

template <int KIND> INLINE float gated(float gate, float up, float alpha, float limit) {
    if constexpr (KIND == SILU) return silu(gate) * up;
    else if constexpr (KIND == GELU_TANH) return gelu_tanh(gate) * up;
    else return clamped_gate(gate, up, alpha, limit);
}
