//! Files that shrink while they are mapped. Touching a page behind a file's new end raises SIGBUS; for watched maps, the handler maps zeros in its place and
//! marks the map, so that the computation fails instead of the process. The owner of a watched map must check the mark before it trusts results.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};

use crate::platform::{FAULTS, error_number};

/// No page of the map was missing.
const WHOLE: u64 = u64::MAX;

/// One watched map. Nodes are never freed, so the handler may walk them at any time; nodes of dropped maps are reused.
struct Node {
    /// A sequence lock: odd while base and length change. The handler trusts the pair only if this was even and equal before and after. A mixed pair could
    /// claim addresses of neither map.
    version: AtomicU64,
    /// 0: free.
    base: AtomicUsize,
    len: AtomicUsize,
    /// Offset of the lowest page that was missing.
    missing: AtomicU64,
    next: AtomicPtr<Node>,
}

static NODES: AtomicPtr<Node> = AtomicPtr::new(ptr::null_mut());

impl Node {
    /// Changes base and length together. Returns false, and changes nothing, if the version is no longer `version`.
    fn set(&self, version: u64, base: usize, len: usize) -> bool {
        if self.version.compare_exchange(version, version + 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return false;
        }
        // No later write may become visible before the odd version.
        fence(Ordering::Release);
        self.missing.store(WHOLE, Ordering::Relaxed);
        self.base.store(base, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.version.store(version + 2, Ordering::Release);
        true
    }

    /// Base and length, if they belong together. They do for a map in use, whose node does not change meanwhile.
    fn get(&self) -> Option<(usize, usize)> {
        let before = self.version.load(Ordering::Acquire);
        let found = (self.base.load(Ordering::Relaxed), self.len.load(Ordering::Relaxed));
        // The reads above must not move behind the second read of the version.
        fence(Ordering::Acquire);
        let after = self.version.load(Ordering::Relaxed);
        (before == after && before.is_multiple_of(2) && found.0 != 0).then_some(found)
    }
}

/// The watched maps. Async-signal-safe.
fn nodes() -> impl Iterator<Item = &'static Node> {
    let mut at = NODES.load(Ordering::Acquire);
    std::iter::from_fn(move || {
        // SAFETY: nodes are leaked boxes; a pointer in the list stays valid for ever.
        let node = unsafe { at.as_ref() }?;
        at = node.next.load(Ordering::Acquire);
        Some(node)
    })
}

/// The watched map that holds an address: its node, base and length. Async-signal-safe.
fn find(address: usize) -> Option<(&'static Node, usize, usize)> {
    nodes().find_map(|node| {
        let (base, len) = node.get()?;
        (address >= base && address - base < len).then_some((node, base, len))
    })
}

/// What handled SIGBUS before us. Written once, before the handler is in place.
struct Previous(UnsafeCell<MaybeUninit<libc::sigaction>>);
// SAFETY: written inside `Once` before any reader exists, then only read.
unsafe impl Sync for Previous {}
static PREVIOUS: Previous = Previous(UnsafeCell::new(MaybeUninit::zeroed()));

/// A map that is watched until this is dropped. Must be dropped before the map is unmapped.
pub(crate) struct Watch(&'static Node);

impl Watch {
    /// Watches `len` bytes mapped at `base`.
    pub fn new(base: usize, len: usize) -> Watch {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(install);
        for node in nodes() {
            let version = node.version.load(Ordering::Acquire);
            let free = version.is_multiple_of(2) && node.base.load(Ordering::Relaxed) == 0;
            if free && node.set(version, base, len) {
                return Watch(node);
            }
        }
        let node: &'static Node = Box::leak(Box::new(Node {
            version: AtomicU64::new(0),
            base: AtomicUsize::new(base),
            len: AtomicUsize::new(len),
            missing: AtomicU64::new(WHOLE),
            next: AtomicPtr::new(NODES.load(Ordering::Acquire)),
        }));
        let this = ptr::from_ref(node).cast_mut();
        while let Err(now) =
            NODES.compare_exchange(node.next.load(Ordering::Relaxed), this, Ordering::AcqRel, Ordering::Acquire)
        {
            node.next.store(now, Ordering::Relaxed);
        }
        Watch(node)
    }

    /// The offset of the first page that was missing when it was read, if one was.
    pub fn missing(&self) -> Option<u64> {
        Some(self.0.missing.load(Ordering::Acquire)).filter(|&m| m != WHOLE)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // A node that is taken is changed by its owner alone.
        self.0.set(self.0.version.load(Ordering::Relaxed), 0, 0);
    }
}

fn install() {
    // SAFETY: an all-zero sigaction is a valid one; the handler has the signature that SA_SIGINFO asks for and calls nothing but what is safe in a signal
    // handler. On failure nothing changes, and a missing page ends the process as it would without a handler.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handle as *const () as usize;
        // On the alternate stack, like Rust's own handler for stack overflows, to which other signals are passed on.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(libc::SIGBUS, ptr::null(), (*PREVIOUS.0.get()).as_mut_ptr());
        libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut());
    }
}

/// Async-signal-safe: atomics, `mmap`, `sigaction`, `raise`; errno is left as it was.
extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to a handler with SA_SIGINFO; `error_number` is this thread's.
    unsafe {
        let errno = *error_number();
        if is_access(&*info)
            && let Some((node, base, len)) = find((*info).si_addr() as usize)
        {
            let page = rustix::param::page_size();
            let offset = ((*info).si_addr() as usize - base) / page * page;
            // The pages belong to a read-only file map that is alive, since somebody is reading it. Zeros replace everything to the end of the map at once: all
            // pages behind a missing one are missing too, and each replaced part would be a mapping of its own, whose number is limited.
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            let at = (base + offset) as *mut libc::c_void;
            if libc::mmap(at, len - offset, libc::PROT_READ, flags, -1, 0) != libc::MAP_FAILED {
                node.missing.fetch_min(offset as u64, Ordering::AcqRel);
                *error_number() = errno;
                return;
            }
        }
        pass_on(signal, info, context);
        *error_number() = errno;
    }
}

/// Whether an instruction of this thread raised the signal, and will raise it again when the handler returns. False for a signal that was sent, and for the
/// kernel's early warning of broken memory.
fn is_access(info: &libc::siginfo_t) -> bool {
    FAULTS.contains(&info.si_code)
}

/// Does what would happen without this handler.
///
/// # Safety
/// As for a signal handler, with its own arguments.
unsafe fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: written before this handler was installed. A handler with SA_SIGINFO takes three arguments, one without takes one.
    unsafe {
        let previous = (*PREVIOUS.0.get()).assume_init_ref();
        match previous.sa_sigaction {
            libc::SIG_IGN if !is_access(&*info) => {}
            libc::SIG_DFL | libc::SIG_IGN => {
                // The faulting instruction runs again and ends the process. That holds for ignored signals too: a fault cannot be ignored. A signal that was
                // sent is sent again.
                let mut default: libc::sigaction = std::mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &raw const default, ptr::null_mut());
                if !is_access(&*info) {
                    libc::raise(signal);
                }
            }
            handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
                let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                    std::mem::transmute(handler);
                handler(signal, info, context);
            }
            handler => {
                let handler: extern "C" fn(libc::c_int) = std::mem::transmute(handler);
                handler(signal);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Map;
    use std::os::unix::process::{CommandExt, ExitStatusExt};
    use std::process::{Command, Stdio};
    use std::sync::atomic::AtomicBool;

    #[test]
    fn an_address_is_never_found_in_the_base_of_one_map_and_the_length_of_another() {
        // A short map low down and a long one high up take turns in the same nodes. Between the two lies what only the low base with the large
        // length would hold. The addresses are nobody's: nothing is read.
        const LOW: usize = 1 << 50;
        const HIGH: usize = LOW + (1 << 40);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..5_000_000 {
                    drop(Watch::new(LOW, 4096));
                    drop(Watch::new(HIGH, 1 << 39));
                }
                done.store(true, Ordering::Relaxed);
            });
            while !done.load(Ordering::Relaxed) {
                assert!(find(LOW + (1 << 20)).is_none(), "found in the parts of two maps");
            }
        });
        let (_low, high) = (Watch::new(LOW, 4096), Watch::new(HIGH, 1 << 39));
        assert!(find(LOW + 4095).is_some() && find(LOW + 4096).is_none() && find(LOW - 1).is_none());
        let (node, base, len) = find(HIGH + 5).unwrap();
        assert!(ptr::eq(node, high.0) && (base, len) == (HIGH, 1 << 39));
    }

    /// Run in a process of its own by the test below.
    #[test]
    #[ignore = "ends the process with SIGBUS"]
    fn touches_what_is_gone_of_a_map_that_nobody_watches() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let (watched, other) = (Map::file(&file, 8192).unwrap(), Map::file(&file, 8192).unwrap());
        watched.watch();
        file.set_len(0).unwrap();
        // SAFETY: both lie inside their maps, which are alive.
        let read = |map: &Map| unsafe { map.start().read_volatile() };
        assert_eq!(read(&watched), 0);
        read(&other);
    }

    #[test]
    fn a_fault_elsewhere_ends_the_process_where_sigbus_was_ignored_too() {
        for action in [libc::SIG_DFL, libc::SIG_IGN] {
            let mut child = Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", "fault::tests::touches_what_is_gone_of_a_map_that_nobody_watches", "--ignored"]);
            child.stdout(Stdio::null()).stderr(Stdio::null());
            // SAFETY: both calls are async-signal-safe.
            unsafe {
                child.pre_exec(move || {
                    libc::signal(libc::SIGBUS, action);
                    // A process that goes back to the fault for ever ends by this.
                    libc::setrlimit(libc::RLIMIT_CPU, &libc::rlimit { rlim_cur: 5, rlim_max: 5 });
                    Ok(())
                })
            };
            assert_eq!(child.status().unwrap().signal(), Some(libc::SIGBUS));
        }
    }
}
