/* SPDX-License-Identifier: Apache-2.0 */
/* names.c - what a module's name says, and which names mean the same module. */
#include "daemon/names.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

/* What may stand before the text model's own names; the longest that fits is dropped. */
static const char *const prefixes[] = {
	"model.language_model.model.",
	"model.language_model.",
	"language_model.model.",
	"language_model.",
	"model.text_model.",
	"text_model.",
	"model.model.",
	"transformer.",
	"backbone.",
	"model.",
};

/* Words that say "not the text model", in what stands before "layers.". */
static const char *const towers[] = {"vision", "visual", "audio",   "image",  "vit",
				     "mtp",    "draft",  "encoder", "talker", "code2wav"};

static const struct {
	const char *word, *same_as;
} words[] = {
	{"block_sparse_moe", "mlp"},
	{"feed_forward", "mlp"},
	{"mixer", "mlp"},
	{"moe", "mlp"},
	{"ffn", "mlp"},
	{"shared_expert", "shared_experts"},
	{"w1", "gate_proj"},
	{"w3", "up_proj"},
	{"w2", "down_proj"},
	{"w13", "gate_up_proj"},
	{"w13_proj", "gate_up_proj"},
	{"qkv_a_proj", "fused_qkv_a_proj_with_mqa"},
};

/* Length of "<digits>" at @p, 0 if there are none. */
static size_t digits(const char *p)
{
	return strspn(p, "0123456789");
}

/* First component "layers" with a number behind it; NULL if there is none. */
static const char *find_layers(const char *name)
{
	for (const char *p = name; p; p = strchr(p, '.')) {
		size_t n;

		p += *p == '.';
		if (strncmp(p, "layers.", 7))
			continue;
		n = digits(p + 7);
		if (n && p[7 + n] == '.')
			return p;
	}
	return NULL;
}

static bool contains(const char *p, size_t len, const char *word)
{
	size_t n = strlen(word);

	for (size_t i = 0; i + n <= len; i++)
		if (!strncmp(p + i, word, n))
			return true;
	return false;
}

static const char *drop_prefix(const char *name)
{
	const char *layers = find_layers(name);
	bool other = false;

	for (size_t i = 0; layers && i < sizeof(towers) / sizeof(towers[0]); i++)
		other |= contains(name, (size_t)(layers - name), towers[i]);
	if (layers && !other)
		return layers;
	for (size_t i = 0; i < sizeof(prefixes) / sizeof(prefixes[0]); i++)
		if (!strncmp(name, prefixes[i], strlen(prefixes[i])))
			return name + strlen(prefixes[i]);
	return name;
}

bool exl3_name_key(const char *name, char key[EXL3_KEY_MAX])
{
	const char *p;
	size_t at = 0;

	if (strlen(name) > EXL3_NAME_MAX)
		return false;
	for (p = drop_prefix(name); *p;) {
		size_t len = strcspn(p, "."), n;
		const char *word = p;

		n = len;
		for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
			if (strlen(words[i].word) == len && !strncmp(p, words[i].word, len)) {
				word = words[i].same_as;
				n = strlen(word);
				break;
			}
		if (at + n + 2 > EXL3_KEY_MAX)
			return false;
		memcpy(key + at, word, n);
		at += n;
		p += len;
		if (*p == '.') {
			key[at++] = '.';
			p++;
		}
	}
	key[at] = 0;
	return true;
}

const char *exl3_name_leaf(const char *name)
{
	const char *dot = strrchr(name, '.');

	return dot ? dot + 1 : name;
}

static uint32_t number(const char *p, size_t len)
{
	uint32_t v = 0;

	for (size_t i = 0; i < len; i++)
		v = v * 10 + (uint32_t)(p[i] - '0');
	return v;
}

int exl3_name_layer(const char *name)
{
	static const char *const stems[] = {"layers.", "h.", "blocks."};

	for (const char *p = name; p; p = strchr(p, '.')) {
		p += *p == '.';
		for (size_t i = 0; i < sizeof(stems) / sizeof(stems[0]); i++) {
			size_t s = strlen(stems[i]), n;

			if (strncmp(p, stems[i], s))
				continue;
			n = digits(p + s);
			if (n && n <= 6)
				return (int)number(p + s, n);
		}
	}
	return -1;
}

bool exl3_name_other_tower(const char *name)
{
	/* The first five words: a draft head has the sizes of the text model. */
	const char *layers = find_layers(name);
	size_t len = layers ? (size_t)(layers - name) : strlen(name);

	for (size_t i = 0; i < 5; i++)
		if (contains(name, len, towers[i]))
			return true;
	return false;
}

bool exl3_name_numbered(const char *name, const char *word, size_t *prefix, uint32_t *ret)
{
	const char *leaf = exl3_name_leaf(name);
	size_t n = digits(leaf), w = strlen(word), before = (size_t)(leaf - name);

	if (!n || n > 6 || leaf[n] || before < w + 3)
		return false;
	if (leaf[-1] != '.' || strncmp(leaf - 1 - w, word, w) || leaf[-2 - (int)w] != '.')
		return false;
	*prefix = before - w - 2;
	*ret = number(leaf, n);
	return true;
}

bool exl3_name_rank(const char *name, size_t *prefix)
{
	const char *leaf = exl3_name_leaf(name);

	if (leaf == name || strncmp(leaf, "rank", 4) || !digits(leaf + 4) ||
	    leaf[4 + digits(leaf + 4)])
		return false;
	*prefix = (size_t)(leaf - name) - 1;
	return true;
}

bool exl3_name_expert(const char *name, size_t *prefix, uint32_t *expert, const char **leaf)
{
	for (const char *p = name; (p = strstr(p, "experts.")); p++) {
		const char *num = p + 8;
		size_t n = digits(num);

		/* "shared_experts.0." is not a routed expert. */
		if (p != name && p[-1] != '.')
			continue;
		if (!n || n > 6 || num[n] != '.' || strchr(num + n + 1, '.'))
			continue;
		*prefix = (size_t)(num - name) - 1;
		*expert = number(num, n);
		*leaf = num + n + 1;
		return true;
	}
	return false;
}

enum exl3_role exl3_name_role(const char *leaf)
{
	static const struct {
		const char *name;
		enum exl3_role role;
	} roles[] = {
		{"gate_proj", EXL3_ROLE_GATE}, {"up_proj", EXL3_ROLE_UP},
		{"down_proj", EXL3_ROLE_DOWN}, {"w1", EXL3_ROLE_GATE},
		{"w3", EXL3_ROLE_UP},          {"w2", EXL3_ROLE_DOWN},
	};

	for (size_t i = 0; i < sizeof(roles) / sizeof(roles[0]); i++)
		if (!strcmp(roles[i].name, leaf))
			return roles[i].role;
	return EXL3_ROLE_NONE;
}
