/* SPDX-License-Identifier: Apache-2.0 */
/* exl3ctl_out.c - what is printed: names made safe for a terminal, sizes, JSON from any message. */
#include "client/exl3ctl.h"

#include <cjson/cJSON.h>
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define SAFE_MAX 4608 /* a path and some more */

/* Some more than one printf call uses. */
static char *next_buffer(void)
{
	static char buffers[8][SAFE_MAX];
	static unsigned turn;

	return buffers[turn++ % 8];
}

/* Length of the UTF-8 sequence at @p, 0: none that is valid. */
static size_t utf8_length(const unsigned char *p)
{
	static const struct {
		unsigned char lead, mask;
		uint32_t least;
	} forms[] = {{0xc0, 0xe0, 0x80}, {0xe0, 0xf0, 0x800}, {0xf0, 0xf8, 0x10000}};

	if (*p < 0x80)
		return *p ? 1 : 0;
	for (size_t f = 0; f < 3; f++) {
		uint32_t v;

		if ((*p & forms[f].mask) != forms[f].lead)
			continue;
		v = *p & (unsigned char)~forms[f].mask;
		for (size_t i = 1; i <= f + 1; i++) {
			if ((p[i] & 0xc0) != 0x80)
				return 0;
			v = v << 6 | (p[i] & 0x3f);
		}
		if (v < forms[f].least || v > 0x10ffff || (v >= 0xd800 && v < 0xe000))
			return 0;
		return f + 2;
	}
	return 0;
}

/* Copies valid text; what @refuse says no to becomes a question mark. */
static const char *clean(const char *text, bool (*refuse)(const unsigned char *p, size_t n))
{
	const unsigned char *p = (const unsigned char *)(text ? text : "");
	char *buf = next_buffer();
	size_t out = 0;

	while (*p && out + 4 < SAFE_MAX) {
		size_t n = utf8_length(p);

		if (n == 0 || (refuse && refuse(p, n))) {
			buf[out++] = '?';
			p += n ? n : 1;
			continue;
		}
		memcpy(buf + out, p, n);
		out += n;
		p += n;
	}
	buf[out] = 0;
	return buf;
}

/* Control bytes, C1 controls (U+0080..9F), and marks that change the direction of what follows. */
static bool moves_the_cursor(const unsigned char *p, size_t n)
{
	if (n == 1)
		return *p < 0x20 || *p == 0x7f;
	if (n == 2)
		return p[0] == 0xc2 && p[1] < 0xa0;
	return n == 3 && p[0] == 0xe2 &&
	       ((p[1] == 0x80 &&
		 (p[2] == 0x8e || p[2] == 0x8f || (p[2] >= 0xaa && p[2] <= 0xae))) ||
		(p[1] == 0x81 && p[2] >= 0xa6 && p[2] <= 0xa9));
}

const char *ctl_safe(const char *text)
{
	return clean(text, moves_the_cursor);
}

const char *ctl_bytes(uint64_t bytes)
{
	static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
	double v = (double)bytes;
	char *buf = next_buffer();
	unsigned u = 0;

	for (; v >= 1024 && u < 4; u++)
		v /= 1024;
	snprintf(buf, SAFE_MAX, u ? "%.1f %s" : "%.0f %s", v, units[u]);
	return buf;
}

const char *ctl_rate(uint32_t rate2_min, uint32_t rate2_max)
{
	char *buf = next_buffer();

	if (rate2_min == rate2_max)
		snprintf(buf, SAFE_MAX, "%g", rate2_min / 2.0);
	else
		snprintf(buf, SAFE_MAX, "%g..%g", rate2_min / 2.0, rate2_max / 2.0);
	return buf;
}

const char *ctl_codebook(uint32_t codebook)
{
	static const char *const names[EXL3_CB_NR] = {"3inst", "mcg", "mul1"};

	return codebook < EXL3_CB_NR ? names[codebook] : "?";
}

const char *ctl_enum(const ProtobufCEnumDescriptor *desc, int value)
{
	const ProtobufCEnumValue *v = protobuf_c_enum_descriptor_get_value(desc, value);
	char *buf = next_buffer();
	const char *name;
	size_t i;

	if (!v)
		return "unknown";
	/* MODEL_READY: the part before the underscore says which enum it is. */
	name = strchr(v->name, '_');
	name = name ? name + 1 : v->name;
	for (i = 0; name[i] && i + 1 < SAFE_MAX; i++)
		buf[i] = (char)tolower((unsigned char)name[i]);
	buf[i] = 0;
	return buf;
}

/* ---- JSON ---- */

/* Numbers beyond 2^53 would lose digits as a double: written as they are. */
static cJSON *json_integer(bool negative, uint64_t magnitude)
{
	char text[24];

	snprintf(text, sizeof(text), "%s%llu", negative ? "-" : "", (unsigned long long)magnitude);
	return cJSON_CreateRaw(text);
}

static cJSON *json_signed(int64_t v)
{
	return v < 0 ? json_integer(true, 0 - (uint64_t)v) : json_integer(false, (uint64_t)v);
}

static cJSON *json_value(const ProtobufCFieldDescriptor *f, const void *at)
{
	switch (f->type) {
	case PROTOBUF_C_TYPE_INT32:
	case PROTOBUF_C_TYPE_SINT32:
	case PROTOBUF_C_TYPE_SFIXED32:
		return json_signed(*(const int32_t *)at);
	case PROTOBUF_C_TYPE_UINT32:
	case PROTOBUF_C_TYPE_FIXED32:
		return json_integer(false, *(const uint32_t *)at);
	case PROTOBUF_C_TYPE_INT64:
	case PROTOBUF_C_TYPE_SINT64:
	case PROTOBUF_C_TYPE_SFIXED64:
		return json_signed(*(const int64_t *)at);
	case PROTOBUF_C_TYPE_UINT64:
	case PROTOBUF_C_TYPE_FIXED64:
		return json_integer(false, *(const uint64_t *)at);
	case PROTOBUF_C_TYPE_FLOAT:
		return cJSON_CreateNumber(*(const float *)at);
	case PROTOBUF_C_TYPE_DOUBLE:
		return cJSON_CreateNumber(*(const double *)at);
	case PROTOBUF_C_TYPE_BOOL:
		return cJSON_CreateBool(*(const protobuf_c_boolean *)at);
	case PROTOBUF_C_TYPE_ENUM:
		return cJSON_CreateString(ctl_enum(f->descriptor, *(const int *)at));
	case PROTOBUF_C_TYPE_STRING:
		return cJSON_CreateString(
			clean(*(char *const *)at, NULL)); /* cJSON escapes controls */
	case PROTOBUF_C_TYPE_MESSAGE:
		return *(const ProtobufCMessage *const *)at
			       ? ctl_json(*(const ProtobufCMessage *const *)at, NULL)
			       : cJSON_CreateNull();
	default:
		return cJSON_CreateNull();
	}
}

static size_t element_size(ProtobufCType type)
{
	switch (type) {
	case PROTOBUF_C_TYPE_INT64:
	case PROTOBUF_C_TYPE_SINT64:
	case PROTOBUF_C_TYPE_SFIXED64:
	case PROTOBUF_C_TYPE_UINT64:
	case PROTOBUF_C_TYPE_FIXED64:
	case PROTOBUF_C_TYPE_DOUBLE:
		return 8;
	case PROTOBUF_C_TYPE_STRING:
	case PROTOBUF_C_TYPE_MESSAGE:
		return sizeof(void *);
	case PROTOBUF_C_TYPE_BOOL:
		return sizeof(protobuf_c_boolean);
	default:
		return 4;
	}
}

struct cJSON *ctl_json(const ProtobufCMessage *msg, const char *skip)
{
	const ProtobufCMessageDescriptor *d = msg->descriptor;
	cJSON *json = cJSON_CreateObject();

	for (unsigned i = 0; i < d->n_fields; i++) {
		const ProtobufCFieldDescriptor *f = &d->fields[i];
		const char *at = (const char *)msg + f->offset;
		cJSON *value;

		if (skip && !strcmp(skip, f->name))
			continue;
		if (f->label == PROTOBUF_C_LABEL_REPEATED) {
			size_t n = *(const size_t *)((const char *)msg + f->quantifier_offset);
			const char *array = *(const char *const *)at;

			value = cJSON_CreateArray();
			for (size_t j = 0; j < n; j++)
				cJSON_AddItemToArray(
					value, json_value(f, array + j * element_size(f->type)));
		} else {
			value = json_value(f, at);
		}
		cJSON_AddItemToObject(json, f->name, value);
	}
	return json;
}

int ctl_print_cjson(struct cJSON *json)
{
	char *text = json ? cJSON_Print(json) : NULL;

	cJSON_Delete(json);
	if (!text)
		return ctl_error(CTL_LOCAL, "out of memory");
	puts(text);
	free(text);
	return CTL_OK;
}

int ctl_print_json(const ProtobufCMessage *msg, const char *skip)
{
	return ctl_print_cjson(ctl_json(msg, skip));
}
