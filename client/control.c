/* SPDX-License-Identifier: Apache-2.0 */
/* control.c - one control request and its reply at a time. */
#include "client/internal.h"

#include "proto/frame.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>

void exl3_reply_freep(Exl3__Reply **reply)
{
	if (*reply)
		exl3__reply__free_unpacked(*reply, NULL);
	*reply = NULL;
}

/* An answer that comes too late, or not in order, would be taken for that of the next request: after
 * such an error the connection is of no use any more. */
static int give_up(struct exl3_client *c, int code)
{
	exl3_client_lost(c);
	return code;
}

/* What the daemon may have said before it hung up: a connection that nobody will serve is told why, in a
 * reply with id 0. @code: of the failure that was met, its sentence is there already. */
static int last_words(struct exl3_client *c, int code)
{
	struct exl3_error met = *exl3_client_err();
	int fds[EXL3_FDS_MAX], n;
	unsigned nr_fds;

	/* The first look may only tell that what we have sent was not read. */
	for (int i = 0; i < 2; i++) {
		exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;

		n = exl3_frame_recv(c->sock, c->packet, EXL3_PACKET_MAX, fds, EXL3_FDS_MAX, &nr_fds,
				    EXL3_FRAME_NOWAIT, NULL);
		for (unsigned j = 0; j < nr_fds; j++)
			exl3_closep(&fds[j]);
		if (n > 0)
			reply = exl3__reply__unpack(NULL, (size_t)n, c->packet);
		if (reply && reply->id == 0 && reply->code < 0 && reply->code >= -4095)
			return give_up(c, exl3_errf(exl3_client_err(), reply->code, "%s",
						    reply->error));
	}
	*exl3_client_err() = met;
	return give_up(c, code);
}

static int send_request(struct exl3_client *c, Exl3__Request *req, const int *fds, unsigned nr_fds)
{
	size_t n = exl3__request__get_packed_size(req);
	int e;

	if (n > EXL3_PACKET_MAX)
		return exl3_errf(exl3_client_err(), -EMSGSIZE,
				 "request of %zu bytes; the limit is %u", n, EXL3_PACKET_MAX);
	exl3__request__pack(req, c->packet);
	e = exl3_frame_send(c->sock, c->packet, n, fds, nr_fds, 0, exl3_client_err());
	if (e == -EPIPE || e == -ECONNRESET)
		return last_words(c, exl3_errf(exl3_client_err(), -ESTALE,
					       "the daemon's worker has gone: wait for the next one with "
					       "exl3_reconnect()"));
	return e;
}

/* Sleeps until a packet or the end of the connection is there. */
static int wait_readable(struct exl3_client *c, uint64_t timeout_ns)
{
	uint64_t start = exl3_now_ns();
	struct pollfd p = {.fd = c->sock, .events = POLLIN};

	for (;;) {
		uint64_t passed = exl3_now_ns() - start;
		int ms = -1, n;

		if (timeout_ns != UINT64_MAX)
			ms = passed >= timeout_ns ? 0 : (int)((timeout_ns - passed) / 1000000 + 1);
		n = poll(&p, 1, ms);
		if (n > 0)
			return 0;
		if (n == 0)
			return exl3_errf(exl3_client_err(), -ETIMEDOUT,
					 "the daemon has not answered for %llu s",
					 (unsigned long long)(timeout_ns / 1000000000));
		if (errno != EINTR)
			return exl3_errf(exl3_client_err(), -errno, "poll: %m");
	}
}

static int recv_reply(struct exl3_client *c, Exl3__Reply **ret, int *fds, unsigned *nr_fds)
{
	int n, e;

	n = exl3_frame_recv(c->sock, c->packet, EXL3_PACKET_MAX, fds, EXL3_FDS_MAX, nr_fds, 0,
			    exl3_client_err());
	if (n == -EINTR)
		return n;
	if (n == -ECONNRESET)
		return exl3_errf(exl3_client_err(), -ESTALE, "the daemon's worker has gone: wait for the next one with exl3_reconnect()");
	if (n < 0)
		return n;
	*ret = exl3__reply__unpack(NULL, (size_t)n, c->packet);
	if (*ret)
		return 0;
	e = exl3_errf(exl3_client_err(), -EPROTO, "the daemon's answer makes no sense");
	for (unsigned i = 0; i < *nr_fds; i++)
		exl3_closep(&fds[i]);
	return e;
}

/* The first answer says who the daemon is; all others must come from the same one. */
static int check_identity(struct exl3_client *c, const Exl3__Reply *r)
{
	if (!c->instance && !c->generation) {
		c->instance = r->instance;
		c->generation = r->generation;
	}
	if (c->instance == r->instance && c->generation == r->generation)
		return 0;
	return exl3_errf(exl3_client_err(), -ESTALE,
			 "the answer comes from another start of the daemon: connect again");
}

static int check_reply(const Exl3__Reply *r, Exl3__Reply__BodyCase want, unsigned got_fds,
		       unsigned want_fds)
{
	if (r->code > 0 || r->code < -4095)
		return exl3_errf(exl3_client_err(), -EPROTO, "the daemon's answer has code %d",
				 r->code);
	if (r->code < 0)
		return exl3_errf(exl3_client_err(), r->code, "%s",
				 r->error && *r->error ? r->error : "refused without a reason");
	if (want != EXL3__REPLY__BODY__NOT_SET && r->body_case != want)
		return exl3_errf(exl3_client_err(), -EPROTO,
				 "the daemon's answer is of kind %d, expected was %d",
				 (int)r->body_case, (int)want);
	if (got_fds != want_fds)
		return exl3_errf(exl3_client_err(), -EPROTO,
				 "%u descriptors came with the answer, expected were %u", got_fds,
				 want_fds);
	return 0;
}

int exl3_client_call_locked(struct exl3_client *c, Exl3__Request *req, Exl3__Reply__BodyCase want,
			    uint64_t timeout_ns, Exl3__Reply **ret, int *fds, unsigned nr_fds,
			    const int *send, unsigned nr_send)
{
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	int got[EXL3_FDS_MAX];
	unsigned nr_got = 0;
	int e;

	req->id = ++c->next_id;
	e = send_request(c, req, send, nr_send);
	if (e < 0)
		return e;
	do {
		e = wait_readable(c, timeout_ns);
		if (e == 0)
			e = recv_reply(c, &reply, got, &nr_got);
	} while (e == -EINTR);
	if (e == -ESTALE)
		return last_words(c, e);
	if (e < 0)
		return give_up(c, e);
	if (reply->id == 0 && reply->code < 0 && reply->code >= -4095)
		e = give_up(c, exl3_errf(exl3_client_err(), reply->code, "%s", reply->error));
	else if (reply->id != req->id)
		e = give_up(c, exl3_errf(exl3_client_err(), -EPROTO,
					 "the daemon answered another request"));
	else
		e = check_identity(c, reply);
	if (e == 0)
		e = check_reply(reply, want, nr_got, nr_fds);
	for (unsigned i = 0; i < nr_got; i++) {
		if (e == 0)
			fds[i] = got[i];
		else
			exl3_closep(&got[i]);
	}
	if (e == 0 && ret)
		*ret = exl3_take_ptr(&reply);
	return e;
}

int exl3_client_call(struct exl3_client *c, Exl3__Request *req, Exl3__Reply__BodyCase want,
		     uint64_t timeout_ns, Exl3__Reply **ret, int *fds, unsigned nr_fds)
{
	int e = exl3_client_check(c);

	if (e < 0)
		return e;
	pthread_mutex_lock(&c->call);
	e = exl3_client_check(c); /* it may have gone while we waited for the lock */
	if (e == 0)
		e = exl3_client_call_locked(c, req, want, timeout_ns, ret, fds, nr_fds, NULL, 0);
	pthread_mutex_unlock(&c->call);
	return e;
}

int exl3_client_call_send(struct exl3_client *c, Exl3__Request *req, Exl3__Reply__BodyCase want,
			  uint64_t timeout_ns, Exl3__Reply **ret, const int *send, unsigned nr_send)
{
	int e = exl3_client_check(c);

	if (e < 0)
		return e;
	pthread_mutex_lock(&c->call);
	e = exl3_client_check(c);
	if (e == 0)
		e = exl3_client_call_locked(c, req, want, timeout_ns, ret, NULL, 0, send, nr_send);
	pthread_mutex_unlock(&c->call);
	return e;
}

void exl3_client_tell(struct exl3_client *c, Exl3__Request *req, uint64_t epoch)
{
	struct exl3_error saved = *exl3_client_err();

	if (exl3_client_forked(c))
		return;
	pthread_mutex_lock(&c->call);
	if (exl3_alive(c) && (epoch == UINT64_MAX || epoch == c->epoch))
		exl3_client_call_locked(c, req, EXL3__REPLY__BODY__NOT_SET, EXL3_CALL_TIMEOUT_NS,
					NULL, NULL, 0, NULL, 0);
	pthread_mutex_unlock(&c->call);
	/* Closing reports nothing, and must not hide why the caller closes. */
	*exl3_client_err() = saved;
}
