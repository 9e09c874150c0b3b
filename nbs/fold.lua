-- What a reader skips at first is folded: imports, the code of a figure, and source of more than sixty lines.
-- A cell that says itself how it is shown (#| code-fold) keeps its word, except where nbdev says it of every exported cell.
local LONG = 60

local function only_imports(code)
  local open = false
  for line in code:gmatch("[^\n]+") do
    local starts = line:match("^import ") or line:match("^from [%w_.]+ import ")
    if not (starts or open or line:match("^%s*#") or line:match("^%s*$")) then return false end
    if starts or open then open = (open or line:find("%(")) and not line:find("%)") or line:match("\\%s*$") ~= nil end
  end
  return true
end

function Div(cell)
  if not cell.classes:includes("cell") then return nil end
  local figure = false
  cell:walk({ Image = function() figure = true end })
  return cell:walk({
    CodeBlock = function(block)
      if not block.classes:includes("cell-code") then return nil end
      local given = block.attributes["code-summary"]
      if block.attributes["code-fold"] and given ~= "Exported source" then return nil end
      local _, breaks = block.text:gsub("\n", "")
      local summary
      if only_imports(block.text) then
        summary = "Imports"
      elseif figure then
        summary = "Code of the figure"
      elseif breaks + 1 > LONG then
        summary = string.format("%s (%d lines)", given or "Code", breaks + 1)
      end
      if summary then
        block.attributes["code-fold"] = "true"
        block.attributes["code-summary"] = summary
      end
      return block
    end,
  })
end
