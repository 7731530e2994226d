//! Files that shrink while they are mapped. Touching a page behind a file's new end raises SIGBUS; for maps that are watched here the
//! handler puts zeros in its place and marks the map, so that whoever computes with it can end with an error instead of the
//! process. Whoever watches a map must look at its mark before using what was computed from it.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

/// No page of the map was missing.
const WHOLE: u64 = u64::MAX;

/// One watched map. Nodes are never freed, so the handler may walk them at any instant; those of dropped maps are used again.
struct Node {
    /// 0: free.
    base: AtomicUsize,
    len: AtomicUsize,
    /// Offset of the lowest page that was missing.
    missing: AtomicU64,
    next: AtomicPtr<Node>,
}

static NODES: AtomicPtr<Node> = AtomicPtr::new(ptr::null_mut());

/// What handled SIGBUS before us. Written once, before the handler is in place.
struct Previous(UnsafeCell<MaybeUninit<libc::sigaction>>);
// SAFETY: written inside `Once` before any reader exists, then only read.
unsafe impl Sync for Previous {}
static PREVIOUS: Previous = Previous(UnsafeCell::new(MaybeUninit::uninit()));

/// A map that is watched until this is dropped. Must be dropped before the map is unmapped.
pub(crate) struct Watch(&'static Node);

impl Watch {
    /// Watches `len` bytes mapped at `base`.
    pub fn new(base: usize, len: usize) -> Watch {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(install);
        let mut at = NODES.load(Ordering::Acquire);
        // SAFETY: nodes are leaked boxes; a pointer in the list stays valid for ever.
        while let Some(node) = unsafe { at.as_ref() } {
            // The length first would be seen with the old base, so a node is taken with a length of 0.
            if node.base.compare_exchange(0, base, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                node.missing.store(WHOLE, Ordering::Relaxed);
                node.len.store(len, Ordering::Release);
                return Watch(node);
            }
            at = node.next.load(Ordering::Acquire);
        }
        let node: &'static Node = Box::leak(Box::new(Node {
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
        self.0.len.store(0, Ordering::Release);
        self.0.base.store(0, Ordering::Release);
    }
}

fn install() {
    // SAFETY: an all-zero sigaction is a valid one; the handler has the signature that SA_SIGINFO asks for and calls nothing but
    // what is safe in a signal handler. On failure nothing has changed, and a missing page ends the process as without us.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handle as *const () as usize;
        // On the alternate stack, as Rust's own handler for overflowing stacks, to which we pass on what is not ours.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(libc::SIGBUS, ptr::null(), (*PREVIOUS.0.get()).as_mut_ptr());
        libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut());
    }
}

/// Async-signal-safe: atomics, `mmap`, `sigaction`; errno is left as it was.
extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to a handler with SA_SIGINFO; `__errno_location` is this thread's.
    unsafe {
        let errno = *libc::__errno_location();
        // Only faults that the kernel raised carry an address.
        let address = if (*info).si_code > 0 { (*info).si_addr() as usize } else { 0 };
        let mut at = NODES.load(Ordering::Acquire);
        while let Some(node) = at.as_ref() {
            let (base, len) = (node.base.load(Ordering::Acquire), node.len.load(Ordering::Acquire));
            if address != 0 && base != 0 && address >= base && address - base < len {
                let page = rustix::param::page_size();
                let offset = (address - base) / page * page;
                // The pages belong to a read-only file map that is alive, since somebody is reading it. Zeros take their place, to the
                // end of the map at once: what lies behind a missing page is missing too, and each part is a mapping of its own,
                // of which a process can only have so many.
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
                let at = (base + offset) as *mut libc::c_void;
                if libc::mmap(at, len - offset, libc::PROT_READ, flags, -1, 0) != libc::MAP_FAILED {
                    node.missing.fetch_min(offset as u64, Ordering::AcqRel);
                    *libc::__errno_location() = errno;
                    return;
                }
            }
            at = node.next.load(Ordering::Acquire);
        }
        pass_on(signal, info, context);
        *libc::__errno_location() = errno;
    }
}

/// Does what would have been done without us.
///
/// # Safety
/// As for a signal handler, with its own arguments.
unsafe fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: written before this handler was installed. A handler with SA_SIGINFO takes three arguments, one without takes one.
    unsafe {
        let previous = (*PREVIOUS.0.get()).assume_init_ref();
        match previous.sa_sigaction {
            libc::SIG_IGN => {}
            libc::SIG_DFL => {
                // The faulting instruction runs again and ends the process; a signal that was sent is sent again.
                libc::sigaction(signal, previous, ptr::null_mut());
                if (*info).si_code <= 0 {
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
