/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint.c - directories: indexes, shards, add-on files, links, and what is refused. */
#include "tests/test.h"

#include "daemon/checkpoint.h"
#include "tests/unit/make_ckpt.h"

#include <sys/stat.h>

#define INDEX "model.safetensors.index.json"

/* A file with tensors of one byte each, names separated by blanks. */
static void file(const char *dir, const char *name, const char *tensors)
{
	struct mk *f = mk_new();
	char one[64];
	int n;

	for (; sscanf(tensors, "%63s%n", one, &n) == 1; tensors += n)
		mk_tensor(f, one, "U8", MK_DIMS(1), NULL, 1);
	mk_save(f, dir, name, 0);
}

static void link_to(const char *dir, const char *name, const char *target)
{
	char path[5000];

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	assert_int_equal(symlink(target, path), 0);
}

/* One directory each; entries "name|content": a tensor list, or text if the name ends in json, or
 * "-> target". */
static const struct {
	const char *files[6];
	int want;
	const char *say; /* in the sentence; or all tensors, sorted, when it is right */
} dirs[] = {
	{{"model.safetensors|b a"}, 0, "a b "},
	{{"x.safetensors|b", "y.safetensors|a", "z.txt|c"}, 0, "a b "},
	{{".hidden.safetensors|b", "y.safetensors|a"}, 0, "a "},
	{{"1.safetensors|a", "2.safetensors|b",
	  INDEX "|{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}"},
	 0,
	 "a b "},
	/* an add-on file that the index does not name; a tensor that it forgot */
	{{"1.safetensors|a forgotten", "mtp.safetensors|m",
	  INDEX "|{\"weight_map\":{\"a\":\"1.safetensors\"}}"},
	 0,
	 "a forgotten m "},
	{{"m-00001-of-00002.safetensors|a", "m-00002-of-00002.safetensors|b"}, 0, "a b "},
	{{"model.safetensors|-> ../no/such"}, -EINVAL, "model.safetensors: a link to nowhere"},
	{{"model.safetensors|-> model.safetensors"},
	 -EINVAL,
	 "model.safetensors: cannot be opened"},
	{{"z.txt|c"}, -ENOENT, "no *.safetensors"},
	{{"x.safetensors|a", "y.safetensors|a"},
	 -EINVAL,
	 "y.safetensors: tensor 'a': also in x.safetensors"},
	{{"1.safetensors|a", "mtp.safetensors|a",
	  INDEX "|{\"weight_map\":{\"a\":\"1.safetensors\"}}"},
	 -EINVAL,
	 "tensor 'a': also in"},
	{{"1.safetensors|a",
	  INDEX "|{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}"},
	 -EINVAL,
	 "tensor 'b': its file 2.safetensors is missing"},
	{{"1.safetensors|a",
	  INDEX "|{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"1.safetensors\"}}"},
	 -EINVAL,
	 "1.safetensors: tensor 'b': named by " INDEX},
	{{"1.safetensors|a", "2.safetensors|b",
	  INDEX "|{\"weight_map\":{\"b\":\"1.safetensors\"}}"},
	 -EINVAL,
	 "1.safetensors: tensor 'b': named by"},
	{{"1.safetensors|a", INDEX "|{\"weight_map\":{\"a\":\"../1.safetensors\"}}"},
	 -EINVAL,
	 "not a plain file name"},
	{{"1.safetensors|a", INDEX "|{\"weight_map\":{\"a\":3}}"},
	 -EINVAL,
	 "tensor 'a': no file name"},
	{{"1.safetensors|a", INDEX "|{\"weight_map\":[]}"}, -EINVAL, "no weight_map"},
	{{"1.safetensors|a", INDEX "|{"}, -EINVAL, INDEX ": not valid JSON"},
	{{"1.safetensors|a", INDEX "|-> " INDEX}, -EINVAL, INDEX ": cannot be opened"},
	{{"1.safetensors|a", "config.json|[]"}, -EINVAL, "config.json: not a JSON object"},
	{{"1.safetensors|a", "config.json|{\"a\":"}, -EINVAL, "config.json: not valid JSON"},
	{{"m-00001-of-00003.safetensors|a", "m-00003-of-00003.safetensors|b"},
	 -EINVAL,
	 "m-00002-of-00003.safetensors is missing"},
	{{"m-00001-of-00002.safetensors|a", "n-00002-of-00002.safetensors|b"},
	 -EINVAL,
	 "m-00002-of-00002.safetensors is missing"},
};

static void make(const char *dir, const char *const *files)
{
	for (int i = 0; i < 6 && files[i]; i++) {
		const char *bar = strchr(files[i], '|');
		char name[100];

		snprintf(name, sizeof(name), "%.*s", (int)(bar - files[i]), files[i]);
		if (!strncmp(bar + 1, "-> ", 3))
			link_to(dir, name, bar + 4);
		else if (strstr(name, ".json"))
			mk_text(dir, name, bar + 1);
		else
			file(dir, name, bar + 1);
	}
}

static void directory_table(void **state)
{
	(void)state;
	for (size_t i = 0; i < TEST_NR(dirs); i++) {
		char *dir = mk_dir(), got[200] = "";
		struct exl3_ckpt c = {0};
		struct exl3_error err = {0};
		int rc;

		make(dir, dirs[i].files);
		rc = exl3_ckpt_open(dir, &c, &err);
		for (uint32_t t = 0; rc == 0 && t < c.nr_tensors; t++) {
			strcat(got, c.tensors[t].t->name);
			strcat(got, " ");
		}
		if (rc != dirs[i].want ||
		    (rc ? !strstr(err.text, dirs[i].say) : strcmp(got, dirs[i].say)))
			fail_msg("directory %zu: returned %d, '%s'; wanted %d, '%s'", i, rc,
				 rc ? err.text : got, dirs[i].want, dirs[i].say);
		if (rc && !strstr(err.text, dir))
			fail_msg("directory %zu: '%s' does not name it", i, err.text);
		exl3_ckpt_fini(&c);
		mk_rmdir(dir);
	}
}

static void not_a_directory(void **state)
{
	struct exl3_ckpt c;
	struct exl3_error err;

	(void)state;
	test_code(exl3_ckpt_open("/no/such/place", &c, &err), -ENOENT, &err);
	test_code(exl3_ckpt_open("/dev/null", &c, &err), -EINVAL, &err);
}

/* As in a download cache: every file is a link to a blob elsewhere. */
static void links_are_followed(void **state)
{
	char *blobs = mk_dir(), *dir = mk_dir(), target[5000];
	struct exl3_ckpt c;
	struct exl3_error err;

	(void)state;
	file(blobs, "0123abcd", "a b");
	mk_text(blobs, "4567", "{\"model_type\":\"llama\"}");
	snprintf(target, sizeof(target), "%s/0123abcd", blobs);
	link_to(dir, "model.safetensors", target);
	snprintf(target, sizeof(target), "%s/4567", blobs);
	link_to(dir, "config.json", target);
	test_code(exl3_ckpt_open(dir, &c, &err), 0, &err);
	assert_int_equal(c.nr_tensors, 2);
	assert_int_equal(c.data_bytes, 2);
	assert_non_null(c.config);
	assert_non_null(exl3_ckpt_find(&c, "b"));
	assert_null(exl3_ckpt_find(&c, "c"));
	exl3_ckpt_fini(&c);
	mk_rmdir(dir);
	mk_rmdir(blobs);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(directory_table),
		test_case(not_a_directory),
		test_case(links_are_followed),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
