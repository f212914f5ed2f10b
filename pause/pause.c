/* Process 1 of a sandbox: it keeps the namespaces alive, reaps orphans in them, and exits on
 * SIGTERM or SIGINT.
 *
 * The signals are blocked and waited for instead of handled: a blocked signal is queued even for
 * process 1, whose signals of default disposition the kernel drops otherwise, so no handler (and
 * no signal return stub) is needed. When it is not process 1 it works the same, without orphans
 * to reap. */
#include "call.h"

enum { SIGINT = 2, SIGTERM = 15, SIGCHLD = 17, SIG_BLOCK = 0, WNOHANG = 1, EINTR = 4 };
enum { PR_SET_NAME = 15 };

void __attribute__((used, noreturn)) wait_for_signals(void)
{
	const u64 signals = 1UL << (SIGINT - 1) | 1UL << (SIGTERM - 1) | 1UL << (SIGCHLD - 1);

	/* The kernel names a program from a memfd `memfd:…` or, before Linux 6.14, by a number. */
	call(NR_PRCTL, PR_SET_NAME, (u64)"pause", 0, 0, 0, 0);
	call(NR_SIGPROCMASK, SIG_BLOCK, (u64)&signals, 0, sizeof signals, 0, 0);
	for (;;) {
		/* Also before the first wait: processes that were orphaned earlier have sent
		   SIGCHLD. */
		while (call(NR_WAIT4, ~0UL, 0, WNOHANG, 0, 0, 0) > 0)
			;
		i64 number = call(NR_SIGTIMEDWAIT, (u64)&signals, 0, 0, sizeof signals, 0, 0);
		if (number == SIGTERM || number == SIGINT)
			leave(0);
		if (number < 0 && number != -EINTR)
			leave(1); /* a filter refuses the call: fail instead of spinning */
	}
}

START_WITH(wait_for_signals);
