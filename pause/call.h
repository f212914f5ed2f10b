/* A system call without a C library, its numbers where they differ, and the first instruction of a program. */
typedef unsigned long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long i64;
typedef int i32;

#if defined(__x86_64__)
enum {
	NR_READ = 0,
	NR_WRITE = 1,
	NR_CLOSE = 3,
	NR_LSEEK = 8,
	NR_MMAP = 9,
	NR_SIGPROCMASK = 14,
	NR_WAIT4 = 61,
	NR_SIGTIMEDWAIT = 128,
	NR_PRCTL = 157,
	NR_EXIT_GROUP = 231,
};

static inline i64 call(u64 nr, u64 a, u64 b, u64 c, u64 d, u64 e, u64 f)
{
	i64 result;
	register u64 r10 __asm__("r10") = d;
	register u64 r8 __asm__("r8") = e;
	register u64 r9 __asm__("r9") = f;
	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return result;
}

/* Calls `function` with the stack that the kernel left: argc, argv. */
#define START_WITH(function) \
	__asm__(".globl _start\n_start: xor %ebp, %ebp\n mov %rsp, %rdi\n and $-16, %rsp\n call " #function "\n")

#elif defined(__aarch64__)
enum {
	NR_CLOSE = 57,
	NR_LSEEK = 62,
	NR_READ = 63,
	NR_WRITE = 64,
	NR_EXIT_GROUP = 94,
	NR_SIGPROCMASK = 135,
	NR_SIGTIMEDWAIT = 137,
	NR_PRCTL = 167,
	NR_MMAP = 222,
	NR_WAIT4 = 260,
};

static inline i64 call(u64 nr, u64 a, u64 b, u64 c, u64 d, u64 e, u64 f)
{
	register u64 x8 __asm__("x8") = nr;
	register u64 x0 __asm__("x0") = a;
	register u64 x1 __asm__("x1") = b;
	register u64 x2 __asm__("x2") = c;
	register u64 x3 __asm__("x3") = d;
	register u64 x4 __asm__("x4") = e;
	register u64 x5 __asm__("x5") = f;
	__asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	return (i64)x0;
}

#define START_WITH(function) __asm__(".globl _start\n_start: mov x29, xzr\n mov x0, sp\n bl " #function "\n")

#else
#error "no system call stub for this architecture"
#endif

static inline void __attribute__((noreturn)) leave(u64 code)
{
	for (;;)
		call(NR_EXIT_GROUP, code, 0, 0, 0, 0, 0);
}
