//! How MLX names a layer's stack of experts: `mlp.switch_mlp.up_proj` for `mlp.experts.up_proj`, and `experts.switch_glu.up_proj` where the experts are
//! directly in the layer, as Gemma 4's are.

/// Between the module that holds the experts and the projection.
const SPELLINGS: [&str; 2] = [".switch_mlp.", ".experts.switch_glu."];

/// MLX's name of the stack that others call `name`.
pub(crate) fn of_stack(name: &str) -> String {
    let Some((module, rest)) = name.split_once(".experts.") else { return name.into() };
    let in_layer = module.rsplit('.').next().is_some_and(|last| last.bytes().all(|b| b.is_ascii_digit()));
    format!("{module}{}{rest}", SPELLINGS[usize::from(in_layer)])
}

/// The module that holds the experts, and what follows the stack's name; `None` if `name` is of no stack of MLX's.
pub(crate) fn split(name: &str) -> Option<(&str, &str)> {
    SPELLINGS.iter().find_map(|spelling| name.split_once(spelling))
}

/// The stack that the module of one expert is a part of: `mlp.switch_mlp.up_proj` for `mlp.experts.7.up_proj`.
pub(crate) fn stack_of(module: &str) -> Option<String> {
    let (holder, rest) = module.split_once(".experts.")?;
    let (expert, part) = rest.split_once('.')?;
    expert.bytes().all(|b| b.is_ascii_digit()).then(|| of_stack(&format!("{holder}.experts.{part}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_in_a_layer_and_in_a_module_of_it() {
        for (name, mlx) in [
            ("model.layers.3.mlp.experts.up_proj", "model.layers.3.mlp.switch_mlp.up_proj"),
            ("layers.3.block_sparse_moe.experts.up_proj", "layers.3.block_sparse_moe.switch_mlp.up_proj"),
            ("layers.3.experts.up_proj", "layers.3.experts.switch_glu.up_proj"),
        ] {
            assert_eq!(of_stack(name), mlx);
            assert_eq!(split(mlx), name.split_once(".experts."));
            assert_eq!(stack_of(&name.replace(".experts.", ".experts.11.")).as_deref(), Some(mlx));
        }
        assert_eq!(
            (of_stack("layers.3.mlp.up_proj"), split("layers.3.mlp.up_proj")),
            ("layers.3.mlp.up_proj".into(), None)
        );
        assert_eq!(stack_of("layers.3.experts.up_proj"), None);
    }
}
