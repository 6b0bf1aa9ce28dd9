/* The order of cores in machines of every shape, where threads are bound, and what a cgroup leaves of the processors. */
#define _GNU_SOURCE /* CPU_SET, nftw */
#include "base/topology.h"

#include <errno.h>
#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- A machine out of a description; kinds are "cpus=efficiency;..."
 * ---------------------------------------------------------------- */

static struct topology topology;

static void order(const char *machine, const char *kinds, const char *mask)
{
    hwloc_topology_t hwloc;
    hwloc_bitmap_t set = hwloc_bitmap_alloc();
    assert_int_equal(hwloc_topology_init(&hwloc), 0);
    assert_int_equal(hwloc_topology_set_synthetic(hwloc, machine), 0);
    assert_int_equal(hwloc_topology_load(hwloc), 0);
    for (char *copy = strdup(kinds), *rest = copy, *kind; (kind = strsep(&rest, ";")) || (free(copy), 0);) {
        char *cpus = strsep(&kind, "=");
        if (!*cpus)
            continue;
        assert_int_equal(hwloc_bitmap_list_sscanf(set, cpus), 0);
        assert_int_equal(hwloc_cpukinds_register(hwloc, set, atoi(kind), 0, NULL, 0), 0);
    }
    if (mask)
        assert_int_equal(hwloc_bitmap_list_sscanf(set, mask), 0);
    memset(&topology, 0xee, sizeof topology);
    topology_order(&topology, hwloc, mask ? set : hwloc_topology_get_topology_cpuset(hwloc));
    topology.quota = 0;
    hwloc_bitmap_free(set);
    hwloc_topology_destroy(hwloc);
}

static void assert_order(const char *machine, const char *kinds, const char *mask, const char *expected)
{
    char text[4096];
    size_t at = 0;
    order(machine, kinds, mask);
    text[0] = 0;
    for (int i = 0; i < topology.n_cores; i++)
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%d", i ? " " : "", topology.cores[i].cpu);
    assert_string_equal(text, expected);
}

static void one_hardware_thread_of_every_core_in_order(void **state)
{
    assert_order("numa:2 l3:2 core:4 pu:2", "", NULL, "0 2 4 6 8 10 12 14 16 18 20 22 24 26 28 30");
    assert_int_equal(topology.n_cpus, 32);
    assert_int_equal(topology.cores[3].node, 0);
    assert_int_equal(topology.cores[8].node, 1);
    assert_int_equal(topology.cores[4].l3, 1);
}

static void siblings_numbered_as_linux_does_are_left_out(void **state)
{
    assert_order("numa:1 core:4 pu:2(indexes=0,4,1,5,2,6,3,7)", "", NULL, "0 1 2 3");
}

static void the_node_and_cache_with_most_usable_cores_come_first(void **state)
{
    /* without core 0, node 1 has 8 cores and node 0 has 7: 4 at its second L3, 3 at its first */
    assert_order("numa:2 l3:2 core:4 pu:2", "", "2-31", "16 18 20 22 24 26 28 30 8 10 12 14 2 4 6");
}

static void nodes_of_one_size_come_by_their_number(void **state)
{
    assert_order("numa:2(indexes=1,0) core:2 pu:1", "", NULL, "2 3 0 1");
}

static void a_node_is_filled_before_a_fuller_cache_of_another(void **state)
{
    /* node 0: caches of 3 and 3 cores; node 1: of 4 and 1 */
    assert_order("numa:2 l3:2 core:4 pu:1", "", "0-2,4-6,8-11,12", "0 1 2 4 5 6 8 9 10 11 12");
}

static void a_mask_of_second_threads_gives_those(void **state)
{
    assert_order("numa:1 core:4 pu:2", "", "1,3-4,7", "1 3 4 7");
    assert_int_equal(topology.n_cpus, 4);
}

static void processors_outside_the_machine_count_for_nothing(void **state)
{
    assert_order("numa:1 core:2 pu:2", "", "3-100", "3");
    assert_order("numa:1 core:2 pu:2", "", "50-60", "");
}

static void fast_cores_come_before_slow_ones(void **state)
{
    assert_order("numa:1 l3:1 core:8 pu:1", "0-3=0;4-7=1", NULL, "4 5 6 7 0 1 2 3");
    assert_order("numa:1 l3:1 core:8 pu:1", "0-1=1;2-5=2;6-7=0", NULL, "2 3 4 5 0 1 6 7"); /* three kinds: P, E, low-power E */
}

static void fast_cores_of_every_node_come_before_slow_ones(void **state)
{
    assert_order("numa:2 core:4 pu:1", "0-1,4-5=0;2-3,6-7=1", NULL, "2 3 6 7 0 1 4 5");
}

static void the_largest_group_is_counted_in_cores_of_the_same_kind(void **state)
{
    /* node 0 has 2 fast and 1 slow cores, node 1 has 1 fast and 3 slow */
    assert_order("numa:2 core:4 pu:1", "0-1,4=1;2-3,5-7=0", "0-2,4-7", "0 1 4 5 6 7 2");
}

static void kinds_of_unknown_speed_do_not_change_the_order(void **state)
{
    assert_order("numa:1 core:4 pu:1", "0-1=-1;2-3=-1", NULL, "0 1 2 3");
}

static void without_cores_every_processor_is_one(void **state) { assert_order("numa:1 pu:4", "", NULL, "0 1 2 3"); }

static void a_machine_beyond_the_limit_is_cut(void **state)
{
    order("numa:1 core:1500 pu:1", "", NULL);
    assert_int_equal(topology.n_cores, 1024);
    assert_int_equal(topology.cores[1023].cpu, 1023);
}

/* ---- Where threads are bound
 * -------------------------------------------------------------------------------------------------------- */

static void assert_place(int n_threads, int i, const char *expected)
{
    cpu_set_t place;
    char text[4096] = "";
    if (topology_place(&topology, n_threads, i, &place))
        for (int cpu = 0; cpu < 64; cpu++)
            if (CPU_ISSET(cpu, &place))
                sprintf(text + strlen(text), "%s%d", *text ? " " : "", cpu);
    assert_string_equal(text, expected);
}

static void as_many_threads_as_cores_get_one_each(void **state)
{
    order("numa:1 l3:1 core:4 pu:2", "0-3=0;4-7=1", NULL);
    const char *expected[] = { "4", "6", "0", "2" };
    for (int i = 0; i < 4; i++)
        assert_place(4, i, expected[i]);
}

static void fewer_threads_share_the_cores_of_their_node(void **state)
{
    order("numa:2 l3:2 core:2 pu:2", "", NULL);
    for (int i = 0; i < 3; i++)
        assert_place(3, i, "0 2 4 6");
    assert_place(5, 4, "0 2 4 6 8 10 12 14");
}

static void fewer_threads_than_fast_cores_stay_on_fast_cores(void **state)
{
    order("numa:1 core:6 pu:1", "0-3=0;4-5=1", NULL);
    assert_place(2, 1, "4 5");
    assert_place(3, 0, "0 1 2 3 4 5");
}

static void threads_that_cannot_have_a_core_each_are_left_alone(void **state)
{
    order("numa:1 core:4 pu:2", "", NULL);
    assert_place(1, 0, "");
    assert_place(5, 0, "");
    assert_place(8, 7, "");
    topology.quota = 3;
    assert_place(2, 0, "");
    topology.quota = 4;
    assert_place(4, 3, "6");
}

/* ---- This machine
 * ------------------------------------------------------------------------------------------------------------------- */

static void this_machine_has_as_many_cores_as_sibling_lists(void **state)
{
    cpu_set_t allowed;
    static char lists[CPU_SETSIZE][128];
    int n = 0, cpus = 0;
    assert_int_equal(sched_getaffinity(0, sizeof allowed, &allowed), 0);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        char path[128];
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
        if (!CPU_ISSET((size_t)cpu, &allowed))
            continue;
        FILE *file = fopen(path, "re");
        if (!file)
            skip();
        assert_non_null(fgets(lists[n], sizeof lists[n], file));
        fclose(file);
        cpus++;
        int seen = 0;
        while (strcmp(lists[seen], lists[n]))
            seen++;
        n += seen == n;
    }
    topology_read(&topology);
    assert_int_equal(topology.n_cores, n);
    assert_int_equal(topology.n_cpus, cpus);
    for (int i = 0; i < n; i++)
        assert_true(CPU_ISSET((size_t)topology.cores[i].cpu, &allowed));
}

static void the_affinity_mask_is_respected(void **state)
{
#ifdef __SANITIZE_THREAD__
    skip(); /* its own thread keeps the wide mask */
#endif
    cpu_set_t before, one;
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    int last = CPU_SETSIZE - 1;
    while (!CPU_ISSET((size_t)last, &before))
        last--;
    CPU_ZERO(&one);
    CPU_SET((size_t)last, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    topology_read(&topology);
    assert_int_equal(sched_setaffinity(0, sizeof before, &before), 0);
    assert_int_equal(topology.n_cores, 1);
    assert_int_equal(topology.cores[0].cpu, last);
}

/* ---- Quotas: a root directory with the files of a test
 * ------------------------------------------------------------------------------- */

static char root[] = "/tmp/strata-topology-XXXXXX";

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *ftw)
{
    return ftw->level ? remove(path) : 0;
}

static int new_root(void **state) { return mkdtemp(root) ? 0 : -1; }
static int empty_root(void **state) { return nftw(root, remove_entry, 16, FTW_DEPTH | FTW_PHYS); }
static int remove_root(void **state) { return rmdir(root); }

static void put(const char *name, const char *content)
{
    char path[1024];
    int length = snprintf(path, sizeof path, "%s/%s", root, name);
    for (char *slash = path + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = 0;
        assert_true(mkdir(path, 0755) == 0 || errno == EEXIST);
    }
    assert_true(length < (int)sizeof path);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(content, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static void without_cgroups_there_is_no_quota(void **state)
{
    assert_int_equal(topology_quota(root), 0);
    put("proc/self/cgroup", "0::/a\n");
    assert_int_equal(topology_quota(root), 0);
}

static void a_quota_is_rounded_up(void **state)
{
    put("proc/self/cgroup", "0::/\n");
    put("sys/fs/cgroup/cpu.max", "150000 100000\n");
    assert_int_equal(topology_quota(root), 2);
    put("sys/fs/cgroup/cpu.max", "200000 100000\n");
    assert_int_equal(topology_quota(root), 2);
    put("sys/fs/cgroup/cpu.max", "1000 100000\n");
    assert_int_equal(topology_quota(root), 1);
    put("sys/fs/cgroup/cpu.max", "max 100000\n");
    assert_int_equal(topology_quota(root), 0);
}

static void the_smallest_quota_of_all_levels_holds(void **state)
{
    put("proc/self/cgroup", "0::/a/b/c\n");
    put("sys/fs/cgroup/a/b/c/cpu.max", "800000 100000\n");
    assert_int_equal(topology_quota(root), 8);
    put("sys/fs/cgroup/a/b/cpu.max", "600000 100000\n");
    assert_int_equal(topology_quota(root), 6);
    put("sys/fs/cgroup/a/cpu.max", "700000 100000\n");
    assert_int_equal(topology_quota(root), 6);
    put("sys/fs/cgroup/cpu.max", "500000 100000\n");
    assert_int_equal(topology_quota(root), 5);
    put("sys/fs/cgroup/a/bc/cpu.max", "100000 100000\n"); /* a neighbour's */
    assert_int_equal(topology_quota(root), 5);
}

static void a_path_of_the_host_falls_back_to_the_mount(void **state)
{
    put("proc/self/cgroup", "0::/docker/0123456789abcdef\n");
    put("sys/fs/cgroup/cpu.max", "300000 100000\n");
    assert_int_equal(topology_quota(root), 3);
    put("proc/self/cgroup", "0::/../../elsewhere\n");
    put("elsewhere/cpu.max", "100000 100000\n");
    put("sys/elsewhere/cpu.max", "100000 100000\n");
    assert_int_equal(topology_quota(root), 3);
}

static void both_generations_side_by_side_hold(void **state)
{
    put("proc/self/cgroup", "4:memory:/m\n3:cpuset:/c\n2:cpu,cpuacct:/a\n1:name=systemd:/s\n0::/u\n");
    put("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "400000\n");
    put("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n");
    assert_int_equal(topology_quota(root), 4);
    put("sys/fs/cgroup/unified/u/cpu.max", "300000 100000\n");
    assert_int_equal(topology_quota(root), 3);
    put("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
    put("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    assert_int_equal(topology_quota(root), 3);
    put("sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "100000\n"); /* another controller's path */
    put("sys/fs/cgroup/cpu/c/cpu.cfs_period_us", "100000\n");
    assert_int_equal(topology_quota(root), 3);
}

static void odd_contents_are_no_quota(void **state)
{
    static const char *const odd[] = { "",
                                       "\n",
                                       "max",
                                       "100000",
                                       "100000 ",
                                       "0 100000",
                                       "100000 0",
                                       "-1 100000",
                                       " 1 1",
                                       "1x",
                                       "1 1x",
                                       "1,1",
                                       "0x10 16",
                                       "1e5 1",
                                       "99999999999999999999999 1",
                                       "\xff\xfe",
                                       "nan nan",
                                       "18446744073709551615 1",
                                       "100000 99999999999999999999999" };
    put("proc/self/cgroup", "0::/a\n");
    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
        put("sys/fs/cgroup/a/cpu.max", odd[i]);
        assert_int_equal(topology_quota(root), 0);
    }
    static const char *const lines[] = { "",        "\n", ":", "::", "0:", "0::", "0::a", "0:cpu", "0::////", "0::/a/../../..\n",
                                         "x\n0::/a" };
    put("sys/fs/cgroup/a/cpu.max", "900000 100000");
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        put("proc/self/cgroup", lines[i]);
        assert_int_equal(topology_quota(root), i == 10 ? 9 : 0);
    }
    char *long_line = malloc(1 << 20);
    memset(long_line, '/', 1 << 20);
    memcpy(long_line, "0::", 3);
    long_line[(1 << 20) - 1] = 0;
    put("proc/self/cgroup", long_line);
    assert_int_equal(topology_quota(root), 0);
    memset(long_line, '1', 1 << 19);
    long_line[1 << 19] = 0;
    put("proc/self/cgroup", "0::/a\n");
    put("sys/fs/cgroup/a/cpu.max", long_line);
    assert_int_equal(topology_quota(root), 0);
    free(long_line);
}

static void numbers_behind_a_key_are_found(void **state)
{
    uint64_t numbers[2] = { 0, 0 };
    put("list", "inactive_file_more 1\ninactive_file 18446744073709551615 7\nMemTotal:\t 42 kB\nempty\n");
    assert_int_equal(topology_numbers(root, "list", "inactive_file", numbers, 2), 2);
    assert_true(numbers[0] == UINT64_MAX);
    assert_int_equal(numbers[1], 7);
    assert_int_equal(topology_numbers(root, "list", "MemTotal", numbers, 2), 1);
    assert_int_equal(numbers[0], 42);
    assert_int_equal(topology_numbers(root, "list", "empty", numbers, 2), 0);
    assert_int_equal(topology_numbers(root, "list", "absent", numbers, 2), 0);
    assert_int_equal(topology_numbers(root, "no file", NULL, numbers, 2), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_hardware_thread_of_every_core_in_order),
        cmocka_unit_test(siblings_numbered_as_linux_does_are_left_out),
        cmocka_unit_test(the_node_and_cache_with_most_usable_cores_come_first),
        cmocka_unit_test(nodes_of_one_size_come_by_their_number),
        cmocka_unit_test(a_node_is_filled_before_a_fuller_cache_of_another),
        cmocka_unit_test(a_mask_of_second_threads_gives_those),
        cmocka_unit_test(processors_outside_the_machine_count_for_nothing),
        cmocka_unit_test(fast_cores_come_before_slow_ones),
        cmocka_unit_test(fast_cores_of_every_node_come_before_slow_ones),
        cmocka_unit_test(the_largest_group_is_counted_in_cores_of_the_same_kind),
        cmocka_unit_test(kinds_of_unknown_speed_do_not_change_the_order),
        cmocka_unit_test(without_cores_every_processor_is_one),
        cmocka_unit_test(a_machine_beyond_the_limit_is_cut),
        cmocka_unit_test(as_many_threads_as_cores_get_one_each),
        cmocka_unit_test(fewer_threads_share_the_cores_of_their_node),
        cmocka_unit_test(fewer_threads_than_fast_cores_stay_on_fast_cores),
        cmocka_unit_test(threads_that_cannot_have_a_core_each_are_left_alone),
        cmocka_unit_test(this_machine_has_as_many_cores_as_sibling_lists),
        cmocka_unit_test(the_affinity_mask_is_respected),
        cmocka_unit_test_teardown(without_cgroups_there_is_no_quota, empty_root),
        cmocka_unit_test_teardown(a_quota_is_rounded_up, empty_root),
        cmocka_unit_test_teardown(the_smallest_quota_of_all_levels_holds, empty_root),
        cmocka_unit_test_teardown(a_path_of_the_host_falls_back_to_the_mount, empty_root),
        cmocka_unit_test_teardown(both_generations_side_by_side_hold, empty_root),
        cmocka_unit_test_teardown(odd_contents_are_no_quota, empty_root),
        cmocka_unit_test_teardown(numbers_behind_a_key_are_found, empty_root),
    };
    return cmocka_run_group_tests(tests, new_root, remove_root);
}
