/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_config.c - any text as a configuration file.
 *
 * What is accepted must mean the same after it was printed and read again; what is refused must say why.
 */
#include "daemon/config.h"
#include "daemon/log.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char *printed(const struct exl3_config *cfg)
{
	char *text = NULL;
	size_t bytes;
	FILE *f = open_memstream(&text, &bytes);

	if (!f)
		abort();
	exl3_config_print(cfg, f);
	fclose(f);
	return text;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct exl3_config cfg, again;
	struct exl3_error err = {0};
	char *text = malloc(size + 1), *one, *two;

	exl3_log_set_level(EXL3_LOG_ERROR);
	if (!text)
		abort();
	memcpy(text, data, size);
	text[size] = 0;
	if (exl3_config_parse_string(text, &cfg, &err) < 0) {
		if (!err.code || !err.text[0])
			abort();
		free(text);
		return 0;
	}
	one = printed(&cfg);
	/* Lines that the INI reader would cut or take for comments cannot come back: leave those. */
	if (exl3_config_parse_string(one, &again, &err) == 0) {
		two = printed(&again);
		if (!strchr(one, ';') && !strchr(one, '#') && strcmp(one, two) != 0)
			abort();
		exl3_config_reload(&cfg, &again);
		free(two);
		exl3_config_fini(&again);
	}
	free(one);
	free(text);
	exl3_config_fini(&cfg);
	return 0;
}
