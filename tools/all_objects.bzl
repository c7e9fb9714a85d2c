"""The object files of libraries and of all that they depend on, as sources of a cc_binary.

A linker takes from a library what something calls. A shared library is to have everything, so that what registers itself
when the library is loaded is there.
"""

def _all_objects_impl(ctx):
    objects = []
    for dep in ctx.attr.deps:
        for linker_input in dep[CcInfo].linking_context.linker_inputs.to_list():
            for library in linker_input.libraries:
                objects.append(depset(library.pic_objects or library.objects or []))
    return [DefaultInfo(files = depset(transitive = objects))]

all_objects = rule(
    implementation = _all_objects_impl,
    attrs = {"deps": attr.label_list(providers = [CcInfo])},
)
