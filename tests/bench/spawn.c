/* Runs a command and writes to descriptor 3: nanoseconds from before fork to after its end,
   microseconds of processor time, peak memory in KiB, wait status.

   A separate process, because the kernel counts the memory of the process that called execve into
   the peak of the program that was executed (exec_mmap(): setmax_mm_hiwater_rss): a Python parent
   would hide every smaller figure. As in wait4(2), peak memory is that of the largest process among
   the command and its reaped children; processor time is their sum. */
#include <stdio.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int main(int count, char **words)
{
	struct timespec before, after;
	struct rusage usage;
	int status;

	if (count < 2)
		return 2;
	clock_gettime(CLOCK_MONOTONIC, &before);
	pid_t child = fork();
	if (child == 0) {
		close(3);
		execv(words[1], words + 1);
		_exit(127);
	}
	if (child < 0 || wait4(child, &status, 0, &usage) < 0)
		return 1;
	clock_gettime(CLOCK_MONOTONIC, &after);
	long long ns = (after.tv_sec - before.tv_sec) * 1000000000LL
		+ after.tv_nsec - before.tv_nsec;
	long cpu = (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000L
		+ usage.ru_utime.tv_usec + usage.ru_stime.tv_usec;
	return dprintf(3, "%lld %ld %ld %d\n", ns, cpu, usage.ru_maxrss, status) < 0;
}
