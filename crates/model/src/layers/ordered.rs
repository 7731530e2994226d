//! Projections, some of which take their inputs in an order of their own: columns that were quantised in the order of activations are beside those of their group, and what
//! they are multiplied with is gathered first.

use anyhow::Result;
use sluice_backend::{Elementwise, Linear, Norm, Operations, Projection, Tensor};

use crate::weights::Weights;

/// An order of columns, and where activations in this order go.
#[derive(Clone, Copy, Debug)]
pub struct Gathered {
    /// `[1, cols]`
    order: Tensor,
    /// `[max_tokens, cols]`
    out: Tensor,
}

impl Gathered {
    /// `x` in this order.
    fn of(self, backend: &mut dyn Operations, x: Tensor) -> Tensor {
        let out = self.out.first_rows(x.rows);
        backend.elementwise(&Elementwise::Gather { x, order: self.order, out });
        out
    }
}

/// Projections of one input and the norm that it goes through.
pub struct Inputs {
    norm: Option<Norm>,
    /// Those that take the input as it is.
    plain: Vec<Projection>,
    /// Those that do not, by their order.
    ordered: Vec<(Gathered, Vec<Projection>)>,
    /// The normed input, where something is ordered: `[max_tokens, cols]`.
    normed: Option<Tensor>,
}

impl Inputs {
    /// # Errors
    /// Without memory for activations.
    pub fn new(w: &mut Weights, norm: Option<Norm>, projections: Vec<Projection>) -> Result<Inputs> {
        let mut inputs = Inputs { norm, plain: Vec::new(), ordered: Vec::new(), normed: None };
        for projection in projections {
            let Some(order) = w.order_of(&projection.linear) else {
                inputs.plain.push(projection);
                continue;
            };
            let same = |(gathered, _): &(Gathered, _)| gathered.order.buffer == order.buffer;
            match inputs.ordered.iter().position(same) {
                Some(at) => inputs.ordered[at].1.push(projection),
                None => {
                    let gathered = Gathered { order, out: w.gathered(order.cols)? };
                    inputs.ordered.push((gathered, vec![projection]));
                    if norm.is_some() {
                        inputs.normed = Some(w.normed(order.cols)?);
                    }
                }
            }
        }
        Ok(inputs)
    }

    /// `out = linear(norm(x))` for each.
    pub fn forward(&self, backend: &mut dyn Operations, x: Tensor) {
        if self.ordered.is_empty() {
            return backend.project(x, self.norm, &self.plain);
        }
        let x = match (self.norm, self.normed.map(|t| t.first_rows(x.rows))) {
            (Some(norm), Some(out)) => {
                backend.elementwise(&Elementwise::Norm { x, norm, out });
                out
            }
            _ => x,
        };
        if !self.plain.is_empty() {
            backend.project(x, None, &self.plain);
        }
        for (gathered, projections) in &self.ordered {
            let x = gathered.of(backend, x);
            backend.project(x, None, projections);
        }
    }
}

/// The projection back to the residual stream.
pub struct Output {
    linear: Linear,
    gathered: Option<Gathered>,
    /// What it puts out, `[max_tokens, hidden]`, and the norm that this goes through.
    branch: Option<(Tensor, Norm)>,
}

impl Output {
    /// # Errors
    /// Without memory for activations.
    pub fn new(w: &mut Weights, linear: Linear, branch: Option<(Tensor, Norm)>) -> Result<Output> {
        let gathered = match w.order_of(&linear) {
            Some(order) => Some(Gathered { order, out: w.gathered(order.cols)? }),
            None => None,
        };
        Ok(Output { linear, gathered, branch })
    }

    /// `residual += linear(x)`, through the norm of the branch if there is one.
    pub fn add(&self, backend: &mut dyn Operations, x: Tensor, residual: Tensor) {
        let x = self.in_order(backend, x);
        let Some((to, norm)) = self.branch else { return backend.project_add(x, &self.linear, residual) };
        let to = to.first_rows(x.rows);
        backend.project(x, None, &[Projection { linear: self.linear.clone(), out: to }]);
        backend.elementwise(&Elementwise::AddNormed { x: to, norm, residual });
    }

    /// `out = linear(x)`
    pub fn put(&self, backend: &mut dyn Operations, x: Tensor, out: Tensor) {
        let x = self.in_order(backend, x);
        backend.project(x, None, &[Projection { linear: self.linear.clone(), out }]);
    }

    fn in_order(&self, backend: &mut dyn Operations, x: Tensor) -> Tensor {
        self.gathered.map_or(x, |gathered| gathered.of(backend, x))
    }
}
