//! Memory for tests of reads beyond the end.

/// Bytes that end where unreadable memory begins, so that a kernel which reads further crashes.
pub struct Guarded {
    map: *mut u8,
    pages: usize,
    len: usize,
}

#[cfg(target_os = "linux")]
impl Guarded {
    const PAGE: usize = 4096;

    pub fn new(bytes: &[u8]) -> Guarded {
        unsafe extern "C" {
            fn mmap(at: *mut u8, len: usize, prot: i32, flags: i32, fd: i32, offset: i64) -> *mut u8;
            fn mprotect(at: *mut u8, len: usize, prot: i32) -> i32;
        }
        let pages = bytes.len().div_ceil(Self::PAGE);
        // SAFETY: a private anonymous map (flags 0x22) of our own, readable and writable (3), its last page forbidden (0).
        unsafe {
            let map = mmap(std::ptr::null_mut(), (pages + 1) * Self::PAGE, 3, 0x22, -1, 0);
            assert!(map as isize != -1);
            assert_eq!(mprotect(map.add(pages * Self::PAGE), Self::PAGE, 0), 0);
            map.add(pages * Self::PAGE - bytes.len()).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            Guarded { map, pages, len: bytes.len() }
        }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: written in `new`.
        unsafe { std::slice::from_raw_parts(self.map.add(self.pages * Self::PAGE - self.len), self.len) }
    }
}

#[cfg(target_os = "linux")]
impl Drop for Guarded {
    fn drop(&mut self) {
        unsafe extern "C" {
            fn munmap(at: *mut u8, len: usize) -> i32;
        }
        // SAFETY: the map made in `new`.
        unsafe { munmap(self.map, (self.pages + 1) * Self::PAGE) };
    }
}
