/* How much memory is left: the system's own figure, and the limits of every cgroup above the process. */
#define _GNU_SOURCE /* nftw */
#include "base/memory.h"

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

#define FREE "free memory"
#define CONTAINER "the container's memory limit"

/* ---- A root directory with the files of a test
 * --------------------------------------------------------------------------------------- */

static char root[] = "/tmp/strata-memory-XXXXXX";

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

/* 1000 KiB, of which 400 are available */
static void put_machine(const char *cgroup)
{
    put("proc/meminfo", "MemTotal:           1000 kB\nMemFree:             100 kB\nMemAvailable:        400 kB\nBuffers: 1 kB\n");
    put("proc/self/cgroup", cgroup);
}

static void assert_room(uint64_t total, uint64_t available, const char *limited_by)
{
    struct memory_room room = memory_room_at(root);
    assert_true(room.total_bytes == total);
    assert_true(room.available_bytes == available);
    assert_string_equal(room.limited_by, limited_by);
}

/* ---- Tests
 * --------------------------------------------------------------------------------------------------------------------------- */

static void without_cgroups_the_system_says(void **state)
{
    put_machine("0::/\n");
    assert_room(1024000, 409600, FREE);
}

static void a_limit_leaves_what_is_not_used(void **state)
{
    put_machine("0::/a\n");
    put("sys/fs/cgroup/a/memory.max", "300000\n");
    put("sys/fs/cgroup/a/memory.current", "100000\n");
    assert_room(300000, 200000, CONTAINER);
}

static void cached_files_that_are_not_in_use_count_as_free(void **state)
{
    put_machine("0::/a\n");
    put("sys/fs/cgroup/a/memory.max", "300000\n");
    put("sys/fs/cgroup/a/memory.current", "100000\n");
    put("sys/fs/cgroup/a/memory.stat", "anon 50000\nfile 50000\ninactive_anon 1\nactive_file 10000\ninactive_file 40000\nslab 5\n");
    assert_room(300000, 240000, CONTAINER);
    put("sys/fs/cgroup/a/memory.stat", "inactive_file 200000\n"); /* counted at another moment than the usage */
    assert_room(300000, 300000, CONTAINER);
}

static void a_soft_limit_counts_as_well(void **state)
{
    put_machine("0::/a\n");
    put("sys/fs/cgroup/a/memory.max", "300000\n");
    put("sys/fs/cgroup/a/memory.high", "250000\n");
    put("sys/fs/cgroup/a/memory.current", "100000\n");
    assert_room(250000, 150000, CONTAINER);
    put("sys/fs/cgroup/a/memory.max", "max\n");
    assert_room(250000, 150000, CONTAINER);
}

static void the_tightest_of_all_levels_holds(void **state)
{
    put_machine("0::/a/b\n");
    put("sys/fs/cgroup/a/b/memory.max", "300000\n"); /* 300000 left */
    put("sys/fs/cgroup/a/b/memory.current", "0\n");
    put("sys/fs/cgroup/a/memory.max", "400000\n"); /* 50000 left */
    put("sys/fs/cgroup/a/memory.current", "350000\n");
    put("sys/fs/cgroup/memory.max", "900000\n"); /* 100000 left */
    put("sys/fs/cgroup/memory.current", "800000\n");
    assert_room(300000, 50000, CONTAINER);
}

static void a_path_of_the_host_falls_back_to_the_mount(void **state)
{
    put_machine("0::/docker/0123456789abcdef\n");
    put("sys/fs/cgroup/memory.max", "300000\n");
    put("sys/fs/cgroup/memory.current", "1000\n");
    assert_room(300000, 299000, CONTAINER);
}

static void the_first_generation_of_cgroups_is_read(void **state)
{
    put_machine("5:cpu,cpuacct:/c\n4:memory:/a/b\n0::/\n");
    put("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "300000\n");
    put("sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", "100000\n");
    put("sys/fs/cgroup/memory/a/b/memory.stat", "inactive_file 1\ntotal_inactive_file 40000\n"); /* with the groups below it */
    put("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712\n");                /* its way to say none */
    put("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "5000000\n");
    assert_room(300000, 240000, CONTAINER);
}

static void no_limit_is_no_limit(void **state)
{
    put_machine("4:memory:/a\n0::/b\n");
    put("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712\n");
    put("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "5000000\n");
    put("sys/fs/cgroup/b/memory.max", "max\n");
    put("sys/fs/cgroup/b/memory.high", "max\n");
    put("sys/fs/cgroup/b/memory.current", "5000000\n");
    assert_room(1024000, 409600, FREE);
}

static void a_wide_limit_on_a_full_machine_is_not_to_blame(void **state)
{
    put_machine("0::/a\n");
    put("sys/fs/cgroup/a/memory.max", "900000\n");
    put("sys/fs/cgroup/a/memory.current", "100000\n");
    assert_room(900000, 409600, FREE);
}

static void more_used_than_allowed_leaves_nothing(void **state)
{
    put_machine("0::/a\n");
    put("sys/fs/cgroup/a/memory.max", "300000\n");
    put("sys/fs/cgroup/a/memory.current", "300001\n");
    assert_room(300000, 0, CONTAINER);
}

static void a_system_that_says_nothing_has_no_limit(void **state)
{
    assert_room(UINT64_MAX, UINT64_MAX, FREE);
    put("proc/self/cgroup", "0::/a\n");
    put("sys/fs/cgroup/a/memory.max", "300000\n"); /* and no usage: nothing is known to be used */
    assert_room(300000, 300000, CONTAINER);
}

static void odd_contents_say_nothing(void **state)
{
    static const char *const odd[] = { "",           "\n",  "max", "-5", " 5", "5x", "0x10", "1e5", "99999999999999999999999",
                                       "\xff\xfe\n", "nan", "+5" };
    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
        char line[64];
        put_machine("4:memory:/b\n0::/a\n");
        put("sys/fs/cgroup/a/memory.max", odd[i]);
        put("sys/fs/cgroup/a/memory.high", odd[i]);
        put("sys/fs/cgroup/a/memory.current", odd[i]);
        put("sys/fs/cgroup/memory/b/memory.limit_in_bytes", odd[i]);
        assert_room(1024000, 409600, FREE);
        put("sys/fs/cgroup/a/memory.max", "300000\n");
        snprintf(line, sizeof line, "inactive_file %s%s", *odd[i] == ' ' ? "x" : "", odd[i]);
        put("sys/fs/cgroup/a/memory.stat", line);
        assert_room(300000, 300000, CONTAINER);
        snprintf(line, sizeof line, "MemTotal: x%s\nMemAvailable:%s", odd[i], *odd[i] == ' ' ? "" : odd[i]);
        put("proc/meminfo", line);
        assert_room(300000, 300000, CONTAINER);
    }
    put_machine("0::/\n");
    put("proc/meminfo", "MemTotal: 18446744073709551615 kB\nMemAvailable: 18014398509481984 kB\n"); /* bytes beyond 64 bits */
    assert_room(UINT64_MAX, UINT64_MAX, FREE);
}

static void this_machine_has_room_within_its_memory(void **state)
{
    struct memory_room room = memory_room();
    assert_true(room.total_bytes <= (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE));
    assert_true(room.available_bytes > 0 && room.available_bytes < room.total_bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(without_cgroups_the_system_says, empty_root),
        cmocka_unit_test_teardown(a_limit_leaves_what_is_not_used, empty_root),
        cmocka_unit_test_teardown(cached_files_that_are_not_in_use_count_as_free, empty_root),
        cmocka_unit_test_teardown(a_soft_limit_counts_as_well, empty_root),
        cmocka_unit_test_teardown(the_tightest_of_all_levels_holds, empty_root),
        cmocka_unit_test_teardown(a_path_of_the_host_falls_back_to_the_mount, empty_root),
        cmocka_unit_test_teardown(the_first_generation_of_cgroups_is_read, empty_root),
        cmocka_unit_test_teardown(no_limit_is_no_limit, empty_root),
        cmocka_unit_test_teardown(a_wide_limit_on_a_full_machine_is_not_to_blame, empty_root),
        cmocka_unit_test_teardown(more_used_than_allowed_leaves_nothing, empty_root),
        cmocka_unit_test_teardown(a_system_that_says_nothing_has_no_limit, empty_root),
        cmocka_unit_test_teardown(odd_contents_say_nothing, empty_root),
        cmocka_unit_test(this_machine_has_room_within_its_memory),
    };
    return cmocka_run_group_tests(tests, new_root, remove_root);
}
