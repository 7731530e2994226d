//! A device: found, checked and opened once for the whole process.

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use anyhow::{Context, Result, ensure};

use crate::device::sys::{DriverError, checked, count, sys};
use crate::kernels::{Exact, Kernel, Kernels, Variant, chosen, ensure_built};

/// The lowest compute capability that kernels are made for.
const MIN_CAPABILITY: (i32, i32) = (7, 5);

/// The variants that operations choose. (The kernels know by themselves whether they overlap.)
const VARIANTS: [Variant; 8] = [
    Variant::Rows,
    Variant::One,
    Variant::Last,
    Variant::Tiles,
    Variant::Prompts,
    Variant::Few,
    Variant::Sets,
    Variant::Joined,
];

/// How a device reads memory of the host.
#[derive(Clone, Copy, Debug)]
pub struct HostMemory {
    /// It has no memory of its own: all of the machine's is its own.
    pub is_integrated: bool,
    /// It takes the host's addresses as they are, through the host's page tables.
    pub has_host_pages: bool,
    /// The driver locks memory that may only be read, such as a mapped file.
    pub locks_read_only: bool,
}

/// A device, its primary context and the kernels that were compiled for it. Stays open until the process ends.
pub struct Device {
    pub ordinal: u32,
    pub name: String,
    pub(super) context: sys::CUcontext,
    handle: sys::CUdevice,
    pub(super) kernels: Kernels,
    /// Whether addresses can be reserved without memory behind them.
    pub reserves: bool,
    pub multiprocessors: usize,
    /// The most bytes of shared memory that a block may have.
    pub shared: usize,
    /// How it reads memory of the host, and whether it has no other.
    pub host: HostMemory,
    /// The [`Variant`]s that are on, a bit each.
    variants: u32,
    /// Which kernels for integers of 11 bits have exact bits on this device; found out at first use.
    exact: OnceLock<Exact>,
}

// SAFETY: a context may be used by any thread on which it is current, and `bind` makes it so; the driver locks what threads share.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

static OPEN: Mutex<Vec<Arc<Device>>> = Mutex::new(Vec::new());

thread_local! {
    /// The context that this crate made current on this thread.
    static CURRENT: Cell<sys::CUcontext> = const { Cell::new(std::ptr::null_mut()) };
}

/// A device's name and how much memory it has. Does not open it.
///
/// # Errors
/// One line if there is no such device or it cannot be used.
pub fn describe(ordinal: u32) -> Result<String> {
    let devices = count()?;
    ensure!(devices > 0, "there is no CUDA device");
    ensure!(ordinal < devices, "there is no device cuda:{ordinal}: the last is cuda:{}", devices - 1);
    let found = Attributes::query(ordinal)?;
    let unified = if found.host.is_integrated { ", shared with the host" } else { "" };
    Ok(format!("{}, {:.1} GB{unified}", found.name, found.bytes as f64 / 1e9))
}

/// As [`describe`], but opens the device: the driver has compiled the kernels for it, or found what it compiled before.
///
/// # Errors
/// One line if there is no such device or it cannot be used.
pub fn open(ordinal: u32) -> Result<String> {
    describe(ordinal).and_then(|name| Device::open(ordinal).map(|_| name))
}

/// A device's attributes.
struct Attributes {
    handle: sys::CUdevice,
    name: String,
    bytes: usize,
    /// 75 for 7.5.
    capability: i32,
    reserves: bool,
    multiprocessors: usize,
    shared: usize,
    host: HostMemory,
}

impl Attributes {
    /// # Errors
    /// If there is no such device or it is too old.
    fn query(ordinal: u32) -> Result<Attributes> {
        use sys::CUdevice_attribute_enum as Attribute;
        let (mut handle, mut name, mut bytes) = (0, [0u8; 256], 0);
        // SAFETY: `count` started the driver; each call fills what it is given.
        unsafe {
            checked(sys::cuDeviceGet(&mut handle, ordinal as i32))?;
            checked(sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, handle))?;
            checked(sys::cuDeviceTotalMem_v2(&mut bytes, handle))?;
        }
        let name = name.split(|b| *b == 0).next().map(|n| String::from_utf8_lossy(n).into_owned()).unwrap_or_default();
        let attribute = |which| -> Result<i32> {
            let mut value = 0;
            // SAFETY: fills one number.
            checked(unsafe { sys::cuDeviceGetAttribute(&mut value, which, handle) })?;
            Ok(value)
        };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let (min_major, min_minor) = MIN_CAPABILITY;
        ensure!(
            (major, minor) >= MIN_CAPABILITY,
            "{name} has compute capability {major}.{minor}, and {min_major}.{min_minor} is needed"
        );
        let reserves = attribute(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)? != 0;
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        let shared = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize;
        // For trying kernels as if a block could have less.
        let less = std::env::var("SLUICE_CUDA_SHARED").ok().filter(|_| cfg!(feature = "tuning"));
        let shared = less.and_then(|bytes| bytes.parse().ok()).map_or(shared, |less: usize| shared.min(less));
        let host = HostMemory {
            is_integrated: attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0,
            has_host_pages: attribute(Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS)? != 0
                && attribute(Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES)? != 0,
            locks_read_only: attribute(Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED)? != 0,
        };
        let capability = 10 * major + minor;
        Ok(Attributes { handle, name, bytes, capability, reserves, multiprocessors, shared, host })
    }
}

impl Device {
    /// Opens a device, or returns it if the process has opened it before.
    ///
    /// # Errors
    /// If there is no such device, it is too old, or it has no memory left for kernels.
    pub fn open(ordinal: u32) -> Result<Arc<Device>> {
        let devices = count()?;
        ensure!(devices > 0, "there is no CUDA device");
        ensure!(ordinal < devices, "there is no device cuda:{ordinal}: the last is cuda:{}", devices - 1);
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = open.iter().find(|d| d.ordinal == ordinal) {
            return Ok(Arc::clone(device));
        }
        let device = Device::new(ordinal).with_context(|| format!("cuda:{ordinal} cannot be used"))?;
        let device = Arc::new(device);
        open.push(Arc::clone(&device));
        Ok(device)
    }

    fn new(ordinal: u32) -> Result<Device> {
        let Attributes { handle, name, capability, reserves, multiprocessors, shared, host, .. } =
            Attributes::query(ordinal)?;
        // Before a context takes memory of a device that cannot be used.
        ensure_built(capability)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the context stays retained until the process ends.
        unsafe {
            checked(sys::cuDevicePrimaryCtxRetain(&mut context, handle)).context("it gives no context")?;
            checked(sys::cuCtxSetCurrent(context))?;
        }
        CURRENT.set(context);
        let kernels = Kernels::load(capability, shared)?;
        // Tensor-core products of sixteen rows need compute capability 8.0.
        let is_on = |variant: &Variant| chosen(*variant) && (*variant != Variant::Tiles || capability >= 80);
        let variants =
            VARIANTS.iter().filter(|variant| is_on(variant)).fold(0, |bits, variant| bits | 1 << *variant as u32);
        Ok(Device {
            ordinal,
            name,
            context,
            handle,
            kernels,
            reserves,
            multiprocessors,
            shared,
            host,
            variants,
            exact: OnceLock::new(),
        })
    }

    /// Whether kernels of this variant are used.
    pub fn has(&self, variant: Variant) -> bool {
        self.variants & 1 << variant as u32 != 0
    }

    /// Whether a kernel is there: some have instructions that only one generation has.
    pub fn has_kernel(&self, kernel: Kernel) -> bool {
        !self.kernels.function(kernel).is_null()
    }

    /// Which kernels of integers of 11 bits were seen to be exact on it; `None` until [`Device::set_exact`] was called.
    pub fn exact(&self) -> Option<Exact> {
        self.exact.get().copied()
    }

    /// Remembers it, the first time.
    pub fn set_exact(&self, exact: Exact) {
        let _ = self.exact.set(exact);
    }

    /// Makes the context current on this thread.
    pub fn bind(&self) {
        if CURRENT.get() != self.context {
            // SAFETY: the context is alive. If this fails, the next call to the driver fails too and reports it.
            let _ = unsafe { sys::cuCtxSetCurrent(self.context) };
            CURRENT.set(self.context);
        }
    }

    /// [`Kernels::load_all`]
    pub fn load_kernels(&self) -> Result<(), DriverError> {
        self.bind();
        self.kernels.load_all()
    }

    /// [`Kernels::load_unit`]
    pub fn load_unit(&self, unit: &str) -> Result<sys::CUmodule> {
        self.bind();
        self.kernels.load_unit(unit)
    }

    /// [`Kernels::print_stamps`]
    #[cfg(feature = "tuning")]
    pub fn print_stamps(&self) {
        self.bind();
        self.kernels.print_stamps();
    }

    /// Free bytes and all bytes of its memory.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.bind();
        let (mut free, mut total) = (0, 0);
        // SAFETY: fills two numbers.
        checked(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }

    /// The properties that memory of this device is created with.
    pub(super) fn allocation(&self) -> sys::CUmemAllocationProp {
        // SAFETY: a struct of numbers and null pointers; zeros are the defaults.
        let mut property: sys::CUmemAllocationProp = unsafe { MaybeUninit::zeroed().assume_init() };
        property.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        property.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        property.location.id = self.handle;
        property
    }
}
