//! The driver, and a device of it: found, checked and opened once for the whole process.
//!
//! Everything that the driver is asked for goes through [`Gpu`]: a device and a stream on it, in which all work of a backend happens in order.

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cudarc::driver::{DriverError, sys};

use crate::graphs::{Graphs, HeldBack, Launch, MOST_HELD};
use crate::kernels::{Kernel, Kernels, Variant, chosen, ensure_built};
use crate::parameters::Parameters;
use crate::quiet::{Asked, Quiet, Retired};
use crate::streams::Point;

/// The least that kernels are made for.
const CAPABILITY: (i32, i32) = (7, 5);
/// CUDA 12.4, which driver 550 brings: older ones refuse the embedded PTX.
const DRIVER: i32 = 12_040;

/// Bytes of a device's memory, from an address that means nothing to the host.
pub type Address = sys::CUdeviceptr;

/// The driver's answer as a result.
pub fn checked(answer: sys::CUresult) -> Result<(), DriverError> {
    answer.result()
}

/// A device, its primary context and the kernels that were compiled for it. Stays open until the process ends.
pub struct Device {
    pub ordinal: u32,
    pub name: String,
    context: sys::CUcontext,
    handle: sys::CUdevice,
    kernels: Kernels,
    /// Whether addresses can be reserved without memory behind them.
    pub reserves: bool,
    pub multiprocessors: usize,
    /// Bytes of shared memory that a block may have at most.
    pub shared: usize,
    /// Which of the ways that kernels offer are taken.
    pub rows: bool,
    pub one: bool,
    pub last: bool,
    pub tiles: bool,
    pub prompts: bool,
    pub few: bool,
    pub thin: bool,
    pub slabs: bool,
    pub joined: bool,
}

// SAFETY: a context may be used by any thread that it is current on, which `bind` sees to; the driver locks what threads share.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

static OPEN: Mutex<Vec<Arc<Device>>> = Mutex::new(Vec::new());

thread_local! {
    /// The context that is current on this thread, as far as this crate has made it so.
    static CURRENT: Cell<sys::CUcontext> = const { Cell::new(std::ptr::null_mut()) };
}

/// How many devices there are.
///
/// # Errors
/// Where there is no driver, or it is too old; one line says which.
pub fn count() -> Result<u32> {
    // SAFETY: looks for a library and loads it.
    ensure!(unsafe { sys::is_culib_present() }, "no CUDA driver is installed (libcuda.so is missing)");
    // SAFETY: the library is there; both only fill what they are given.
    let (answer, version) = unsafe {
        let mut version = 0;
        let answer = checked(sys::cuInit(0)).and_then(|()| checked(sys::cuDriverGetVersion(&mut version)));
        (answer, version)
    };
    answer.context("the CUDA driver does not start")?;
    let (major, minor) = (version / 1000, version % 1000 / 10);
    ensure!(
        version >= DRIVER,
        "the CUDA driver is too old: it supports CUDA {major}.{minor}, and 12.4 (driver 550) is needed"
    );
    let mut devices = 0;
    // SAFETY: fills one number.
    checked(unsafe { sys::cuDeviceGetCount(&mut devices) }).context("the CUDA driver does not count its devices")?;
    Ok(devices as u32)
}

/// What a device is called, and how much memory it has, without opening it.
///
/// # Errors
/// In one line, where there is none that can be used.
pub fn describe(ordinal: u32) -> Result<String> {
    let devices = count()?;
    ensure!(devices > 0, "there is no CUDA device");
    ensure!(ordinal < devices, "there is no device cuda:{ordinal}: the last is cuda:{}", devices - 1);
    let found = Found::look(ordinal)?;
    Ok(format!("{}, {:.1} GB", found.name, found.bytes as f64 / 1e9))
}

/// The same, once it is open: the driver has compiled the kernels for it, or found that it has before.
///
/// # Errors
/// In one line, where there is none that can be used.
pub fn open(ordinal: u32) -> Result<String> {
    describe(ordinal).and_then(|name| Device::open(ordinal).map(|_| name))
}

/// What a device says of itself.
struct Found {
    handle: sys::CUdevice,
    name: String,
    bytes: usize,
    /// 75 for 7.5.
    capability: i32,
    reserves: bool,
    multiprocessors: usize,
    shared: usize,
}

impl Found {
    /// A device that is there, and new enough.
    fn look(ordinal: u32) -> Result<Found> {
        use sys::CUdevice_attribute_enum as Attribute;
        let (mut handle, mut name, mut bytes) = (0, [0u8; 256], 0);
        // SAFETY: the driver was started by `count`; each call fills what it is given.
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
        let (least, below) = CAPABILITY;
        ensure!(
            (major, minor) >= CAPABILITY,
            "{name} has compute capability {major}.{minor}, and {least}.{below} is needed"
        );
        let reserves = attribute(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)? != 0;
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        let shared = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize;
        // As if it had less.
        let less = std::env::var("SLUICE_CUDA_SHARED").ok().filter(|_| cfg!(feature = "tuning"));
        let shared = less.and_then(|bytes| bytes.parse().ok()).map_or(shared, |less: usize| shared.min(less));
        Ok(Found { handle, name, bytes, capability: 10 * major + minor, reserves, multiprocessors, shared })
    }
}

impl Device {
    /// The device with this number.
    ///
    /// # Errors
    /// Where there is no such device, it is too old, or has no memory left for kernels.
    pub fn open(ordinal: u32) -> Result<Arc<Device>> {
        let devices = count()?;
        ensure!(devices > 0, "there is no CUDA device");
        ensure!(ordinal < devices, "there is no device cuda:{ordinal}: the last is cuda:{}", devices - 1);
        let mut open = OPEN.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(device) = open.iter().find(|d| d.ordinal == ordinal) {
            return Ok(Arc::clone(device));
        }
        let device = Device::new(ordinal).with_context(|| format!("cuda:{ordinal} cannot be used"))?;
        let device = Arc::new(device);
        open.push(Arc::clone(&device));
        Ok(device)
    }

    fn new(ordinal: u32) -> Result<Device> {
        let Found { handle, name, capability, reserves, multiprocessors, shared, .. } = Found::look(ordinal)?;
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
        let [rows, one, last, tiles, prompts] =
            [Variant::Rows, Variant::One, Variant::Last, Variant::Tiles, Variant::Prompts].map(chosen);
        // Products of sixteen rows came with compute capability 8.0.
        let tiles = tiles && capability >= 80;
        Ok(Device {
            ordinal,
            name,
            context,
            handle,
            kernels,
            reserves,
            multiprocessors,
            shared,
            rows,
            one,
            last,
            tiles,
            prompts,
            few: chosen(Variant::Few),
            thin: chosen(Variant::Thin),
            slabs: chosen(Variant::Slabs),
            joined: chosen(Variant::Joined),
        })
    }

    /// Makes the context current on this thread.
    pub fn bind(&self) {
        if CURRENT.get() != self.context {
            // SAFETY: the context is alive. What goes wrong here the next call meets again, and says so.
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

    /// Bytes that are free, and all.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.bind();
        let (mut free, mut total) = (0, 0);
        // SAFETY: fills two numbers.
        checked(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }

    /// What memory of this device is asked for by.
    pub(crate) fn allocation(&self) -> sys::CUmemAllocationProp {
        // SAFETY: a struct of numbers and null pointers; what is zero is the default.
        let mut property: sys::CUmemAllocationProp = unsafe { MaybeUninit::zeroed().assume_init() };
        property.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        property.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        property.location.id = self.handle;
        property
    }
}

/// A device and a stream on it.
pub struct Gpu {
    pub device: Arc<Device>,
    pub(crate) stream: sys::CUstream,
    graphs: Arc<Mutex<Graphs>>,
    /// What is open on this device, and on others of its backend.
    pub(crate) asked: Asked,
    pub(crate) retired: Arc<Retired>,
    /// Launches of a step that may be enqueued while something is open.
    pub(crate) most_held: usize,
}

// SAFETY: a stream may be used by any thread, one at a time, on which its context is current.
unsafe impl Send for Gpu {}

impl Gpu {
    pub fn open(ordinal: u32) -> Result<Gpu> {
        let device = Device::open(ordinal)?;
        device.bind();
        let mut stream = std::ptr::null_mut();
        // SAFETY: the context is current; destroyed when dropped.
        checked(unsafe { sys::cuStreamCreate(&mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32) })?;
        let retired = Retired::new(&device);
        Ok(Gpu { device, stream, graphs: Arc::default(), asked: Asked::default(), retired, most_held: MOST_HELD })
    }

    fn graphs(&self) -> MutexGuard<'_, Graphs> {
        self.graphs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// [`Asked::quiet`]
    pub fn quiet(&self) -> Result<Quiet<'_>> {
        self.asked.quiet()
    }

    /// Waits until all that was enqueued is done, and gives back what nobody needs then.
    ///
    /// # Errors
    /// Where something of it went wrong: the device is of no use then until the process ends.
    pub fn wait(&self, quiet: Quiet) -> Result<(), DriverError> {
        self.catch_up()?;
        self.synchronise()?;
        self.graphs().drop_gone();
        self.retired.free(quiet);
        Ok(())
    }

    fn synchronise(&self) -> Result<(), DriverError> {
        self.device.bind();
        // SAFETY: the stream is alive.
        checked(unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    /// Gives back what was set aside, where there is something and it can be waited for. Whether it has.
    pub(crate) fn reclaim(&self) -> bool {
        !self.retired.is_empty() && self.quiet().is_ok_and(|quiet| self.wait(quiet).is_ok())
    }

    /// Whether all that was enqueued is done.
    ///
    /// # Errors
    /// As [`Gpu::wait`]
    pub fn is_idle(&self) -> Result<bool, DriverError> {
        self.device.bind();
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.stream) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => checked(answer).map(|()| true),
        }
    }

    /// Whether launches can be held back.
    pub fn can_hold_back(&self) -> bool {
        let graphs = self.graphs();
        graphs.can_hold_back() && graphs.launches() < self.most_held
    }

    /// Nothing of what is gathered is carried out before [`Gpu::carry_out`], [`Gpu::end_step`] or something that is no launch: something of it waits for the host.
    pub fn hold_back(&self) -> HeldBack {
        HeldBack::new(&self.graphs)
    }

    pub fn holds_back(&self) -> bool {
        self.graphs().holds_back()
    }

    /// Whether no more may be launched before what is open is answered: the driver takes only so many launches, and then waits for the device.
    pub fn is_full(&self) -> bool {
        self.asked.any() && self.graphs().launches() >= self.most_held
    }

    /// Carries out what was gathered, launch by launch.
    pub fn carry_out(&self) -> Result<(), DriverError> {
        self.catch_up()
    }

    /// What was gathered is not carried out: the step has failed.
    pub fn abandon(&self) {
        self.graphs().abandon();
    }

    /// From here on launches are gathered, until [`Gpu::end_step`] or something that is no launch. The step before has ended.
    pub fn begin_step(&self) {
        self.graphs().begin();
    }

    /// The same in the middle of a step, behind something that was no launch.
    pub fn gather(&self) {
        self.graphs().gather();
    }

    /// Carries out what was gathered: as one graph, where the same was gathered before.
    pub fn end_step(&self) -> Result<(), DriverError> {
        self.device.bind();
        self.graphs().end(&self.device.kernels, self.stream)
    }

    /// What comes next waits for a point of another stream.
    pub fn wait_for(&self, point: &Point) -> Result<(), DriverError> {
        self.catch_up()?;
        // SAFETY: both are alive.
        checked(unsafe { sys::cuStreamWaitEvent(self.stream, point.event, 0) })
    }

    /// What comes next waits for all that was enqueued on another.
    pub fn follow(&self, other: &Gpu, point: &Point) -> Result<(), DriverError> {
        other.catch_up()?;
        // SAFETY: both are alive, and `catch_up` has made the point's context current.
        checked(unsafe { sys::cuEventRecord(point.event, other.stream) })?;
        self.wait_for(point)
    }

    /// Copies from another device's memory.
    ///
    /// # Safety
    /// Both have `len` bytes, and this has waited for the other.
    pub unsafe fn receive(&self, to: Address, (other, from): (&Gpu, Address), len: usize) -> Result<(), DriverError> {
        if len == 0 {
            return Ok(());
        }
        self.catch_up()?;
        let [own, its] = [self, other].map(|gpu| gpu.device.context);
        // SAFETY: as the caller vouches. The driver goes through the host where devices do not reach one another.
        checked(unsafe { sys::cuMemcpyPeerAsync(to, own, from, its, len, self.stream) })
    }

    /// Lets copies from another device's memory take the shortest way, where there is one.
    pub fn reach(&self, other: &Gpu) {
        self.device.bind();
        // SAFETY: both contexts are alive, and this one's is current. Where it was done before, or cannot be, nothing is lost.
        let _ = unsafe { sys::cuCtxEnablePeerAccess(other.device.context, 0) };
    }

    /// Carries out what was gathered, launch by launch: something comes that is no launch.
    fn catch_up(&self) -> Result<(), DriverError> {
        self.device.bind();
        self.graphs().interrupt(&self.device.kernels, self.stream)
    }

    /// Enqueues a kernel over `grid` blocks of `block` threads with `shared` bytes of shared memory each.
    ///
    /// # Safety
    /// What the parameters point to is alive until the stream has come so far, and as large as the kernel takes it to be.
    pub unsafe fn launch<P: Parameters>(
        &self,
        kernel: Kernel,
        grid: [u32; 3],
        block: u32,
        shared: u32,
        p: &P,
    ) -> Result<(), DriverError> {
        assert_eq!(kernel.parameters(), size_of::<P>(), "{kernel:?} takes other parameters");
        if grid.contains(&0) {
            return Ok(());
        }
        self.device.bind();
        let launch = Launch { kernel: kernel.index() as u32, grid, block, shared };
        // SAFETY: the kernel takes one parameter of this size; for the rest the caller vouches.
        unsafe { self.graphs().launch(&self.device.kernels, self.stream, launch, p.as_bytes()) }
    }

    /// Copies host bytes to the device; they may be overwritten when this returns.
    ///
    /// # Safety
    /// `to` has room.
    pub unsafe fn write(&self, to: Address, from: &[u8], quiet: Quiet) -> Result<(), DriverError> {
        // SAFETY: as the caller vouches; waited for below.
        unsafe { self.write_later(to, from)? };
        self.wait(quiet)
    }

    /// The same without waiting.
    ///
    /// # Safety
    /// `to` has room; `from` stays as it is until the stream has come so far.
    pub unsafe fn write_later(&self, to: Address, from: &[u8]) -> Result<(), DriverError> {
        if from.is_empty() {
            return Ok(());
        }
        self.catch_up()?;
        // SAFETY: as the caller vouches.
        checked(unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), self.stream) })
    }

    /// Copies bytes of the device to the host, once all that was enqueued is done.
    ///
    /// # Safety
    /// `from` has so many bytes.
    pub unsafe fn read(&self, from: Address, to: &mut [u8], quiet: Quiet) -> Result<(), DriverError> {
        // SAFETY: as the caller vouches; waited for below.
        unsafe { self.read_later(from, to)? };
        self.wait(quiet)
    }

    /// The same without waiting.
    ///
    /// # Safety
    /// `from` has so many bytes; nobody looks at `to` until the stream has come so far.
    pub unsafe fn read_later(&self, from: Address, to: &mut [u8]) -> Result<(), DriverError> {
        if to.is_empty() {
            return Ok(());
        }
        self.catch_up()?;
        // SAFETY: as the caller vouches.
        checked(unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), self.stream) })
    }

    /// Copies within the device, between ranges that are the same or apart.
    ///
    /// # Safety
    /// Both have `len` bytes.
    pub unsafe fn copy(&self, from: Address, to: Address, len: usize) -> Result<(), DriverError> {
        if len == 0 || from == to {
            return Ok(());
        }
        self.catch_up()?;
        // SAFETY: as the caller vouches.
        checked(unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, len, self.stream) })
    }

    /// Fills with zeros before anything of what is gathered is carried out.
    ///
    /// # Safety
    /// There are `len` bytes, which nothing that is gathered uses.
    pub unsafe fn zero_first(&self, at: Address, len: usize) -> Result<(), DriverError> {
        if len == 0 {
            return Ok(());
        }
        self.device.bind();
        // SAFETY: as the caller vouches.
        checked(unsafe { sys::cuMemsetD8Async(at, 0, len, self.stream) })
    }

    /// Fills with zeros.
    ///
    /// # Safety
    /// There are `len` bytes.
    pub unsafe fn zero(&self, at: Address, len: usize) -> Result<(), DriverError> {
        if len == 0 {
            return Ok(());
        }
        self.catch_up()?;
        // SAFETY: as the caller vouches.
        unsafe { self.zero_first(at, len) }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let _ = self.synchronise();
        // SAFETY: nothing is under way in it any more.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
    }
}

/// Points in a stream whose time is looked at later.
pub struct Event(sys::CUevent);

// SAFETY: an event may be used by any thread on which its context is current.
unsafe impl Send for Event {}

impl Event {
    pub fn new(gpu: &Gpu) -> Result<Event, DriverError> {
        gpu.device.bind();
        let mut event = std::ptr::null_mut();
        // SAFETY: the context is current; destroyed when dropped.
        checked(unsafe { sys::cuEventCreate(&mut event, sys::CUevent_flags::CU_EVENT_DEFAULT as u32) })?;
        Ok(Event(event))
    }

    /// Marks where the stream is now.
    pub fn record(&self, gpu: &Gpu) -> Result<(), DriverError> {
        gpu.catch_up()?;
        // SAFETY: both are alive.
        checked(unsafe { sys::cuEventRecord(self.0, gpu.stream) })
    }

    /// What passed since another, both of which the stream has come to.
    pub fn since(&self, before: &Event) -> Result<Duration, DriverError> {
        let mut milliseconds = 0.0;
        // SAFETY: both are alive; fills one number.
        checked(unsafe { sys::cuEventElapsedTime(&mut milliseconds, before.0, self.0) })?;
        Ok(Duration::from_secs_f32(milliseconds.max(0.0) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: it was created so; the driver keeps what is still to be recorded.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}
