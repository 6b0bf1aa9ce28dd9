/* The functions of the contract against double precision. Every 61st float (a prime stride, so that all exponents and many mantissas
 * are visited) in each function's domain, and the special values. */
#include "ops/math.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

/* Distance from the exact value in units of the last place of the result (denormal spacing at the bottom). */
static double ulps(float got, double want)
{
    if (isnan(got)) /* would compare as no error */
        return 1e9;
    if (isinf(got))
        return fabs(want) > 3.4028235e38 ? 0 : 1e9;
    int exponent;
    frexp(want, &exponent);
    double ulp = ldexp(1, exponent - 24 > -149 ? exponent - 24 : -149);
    return fabs((double)got - want) / ulp;
}

static double worst_ulps(float (*f)(float), double (*exact)(double), float low, float high)
{
    double worst = 0;
    for (uint64_t u = 0; u <= UINT32_MAX; u += 61) {
        float x = bits_float((uint32_t)u);
        if (!(x >= low && x <= high))
            continue;
        double error = ulps(f(x), exact((double)x));
        worst = error > worst ? error : worst;
    }
    return worst;
}

static double exact_sigmoid(double x) { return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x)); }
static double exact_silu(double x) { return x * exact_sigmoid(x); }
static double exact_softplus(double x) { return x > 40 ? x : log1p(exp(x)); }
static double exact_half(double x) { return x; }
static float through_half(float x) { return half_to_float(half_from_float(x)); }

static void exp_is_within_2_ulp_everywhere(void **state) { assert_true(worst_ulps(math_exp, exp, -1e30f, 1e30f) <= 2); }
static void log1p_is_within_2_ulp_everywhere(void **state) { assert_true(worst_ulps(math_log1p, log1p, -0.999999f, 3e38f) <= 2); }
static void sigmoid_is_within_2_ulp_everywhere(void **state) { assert_true(worst_ulps(math_sigmoid, exact_sigmoid, -1e30f, 1e30f) <= 2); }
static void silu_is_within_2_ulp_everywhere(void **state) { assert_true(worst_ulps(math_silu, exact_silu, -1e30f, 1e30f) <= 2); }
static void softplus_is_within_2_ulp_everywhere(void **state) { assert_true(worst_ulps(math_softplus, exact_softplus, -1e30f, 1e30f) <= 2); }

static void special_values_pass_through(void **state)
{
    assert_true(math_exp(INFINITY) == INFINITY);
    assert_true(math_exp(-INFINITY) == 0);
    assert_true(isnan(math_exp(NAN)));
    assert_true(math_log1p(INFINITY) == INFINITY);
    assert_true(isnan(math_log1p(NAN)));
    assert_true(math_sigmoid(-INFINITY) == 0 && math_sigmoid(INFINITY) == 1);
    assert_true(isnan(math_sigmoid(NAN)) && isnan(math_silu(NAN)) && isnan(math_softplus(NAN)));
    assert_true(math_softplus(100.0f) == 100.0f);
    assert_true(math_exp(0.0f) == 1.0f && math_silu(0.0f) == 0.0f && math_sigmoid(0.0f) == 0.5f);
}

static void every_half_survives_a_round_trip(void **state)
{
    for (uint32_t h = 0; h < 65536; h++) {
        float f = half_to_float((uint16_t)h);
        if (isnan(f))
            assert_true(isnan(half_to_float(half_from_float(f))));
        else
            assert_int_equal(half_from_float(f), h);
    }
}

static void half_rounds_to_nearest_even(void **state)
{
    assert_int_equal(half_from_float(2049.0f), 0x6800);      /* halfway between 2048 and 2050: even is 2048 */
    assert_int_equal(half_from_float(2051.0f), 0x6802);      /* halfway between 2050 and 2052: even is 2052 */
    assert_int_equal(half_from_float(65519.0f), 0x7bff);
    assert_int_equal(half_from_float(65520.0f), 0x7c00);     /* halfway to 65536 goes to infinity */
    assert_int_equal(half_from_float(0x1p-25f), 0);          /* half of the smallest denormal: even is 0 */
    assert_int_equal(half_from_float(0x1.000002p-25f), 1);
    assert_int_equal(half_from_float(-0x1.8p-24f), 0x8002);
    for (uint64_t u = 0; u <= UINT32_MAX; u += 4001) { /* never further than half the distance between neighbours */
        float x = bits_float((uint32_t)u);
        if (fabsf(x) < 65504 && fabsf(x) >= 0x1p-14f)
            assert_true(fabs(exact_half(x) - through_half(x)) <= ldexp(1, ilogbf(x) - 11));
    }
}

static void rope_cosines_and_sines_are_the_rounded_exact_ones(void **state)
{
    int different = 0;
    for (uint32_t i = 0; i < 4000000; i++) {
        float x = (float)(i % 2 ? i : i * 4.193f) * (i % 3 ? 1.0f : 1e-4f), c, s;
        math_cos_sin((double)x, &c, &s);
        /* libm is within an ulp of double: a float may differ where the exact value lies that close to the middle of two */
        different += c != (float)cos((double)x) || s != (float)sin((double)x);
        assert_true(fabs((double)c - cos((double)x)) < 6.1e-8 && fabs((double)s - sin((double)x)) < 6.1e-8);
    }
    assert_in_range(different, 0, 2);
}

static void rope_frequencies_are_powers_of_the_base(void **state)
{
    static const double bases[] = { 1, 1e4, 1e6, 1e7, 1e12 };
    for (size_t b = 0; b < 5; b++)
        for (int n = 1; n <= 128; n++)
            assert_true(fabs(math_inverse_root(bases[b], n) * pow(bases[b], 1.0 / n) - 1) < 1e-14);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_is_within_2_ulp_everywhere), cmocka_unit_test(log1p_is_within_2_ulp_everywhere),
        cmocka_unit_test(sigmoid_is_within_2_ulp_everywhere), cmocka_unit_test(silu_is_within_2_ulp_everywhere),
        cmocka_unit_test(softplus_is_within_2_ulp_everywhere), cmocka_unit_test(special_values_pass_through),
        cmocka_unit_test(every_half_survives_a_round_trip), cmocka_unit_test(half_rounds_to_nearest_even),
        cmocka_unit_test(rope_cosines_and_sines_are_the_rounded_exact_ones), cmocka_unit_test(rope_frequencies_are_powers_of_the_base),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
